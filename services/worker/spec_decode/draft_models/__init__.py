"""Shared parts of methods with weights: forward passes over the model's blocks, sampling of drafts, published heads."""
