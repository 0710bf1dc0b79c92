"""Heads: the outputs that a sequence's forward pass ends in."""
