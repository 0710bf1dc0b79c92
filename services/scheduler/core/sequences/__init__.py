"""Sequences: their tokens, the rules by which they end, and the rules of a beam search."""
