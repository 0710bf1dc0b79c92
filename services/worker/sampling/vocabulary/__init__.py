"""The tokens that logits are of: all of them, or the shard that this rank has."""
