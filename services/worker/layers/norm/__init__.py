"""Normalization of layer inputs and of heads."""
