"""The tokens that logits are of: all of them, or the part that this rank has."""
