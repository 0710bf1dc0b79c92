"""The tokens that logits cover: the whole vocabulary, or this rank's shard of it."""
