"""Heads: what a sequence's pass through the model ends in."""
