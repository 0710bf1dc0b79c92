"""Sampling features that change logits, one module each, and the helpers that they share."""
