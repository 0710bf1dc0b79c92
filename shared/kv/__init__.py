"""KV blocks as schedulers and workers speak of them: their names, and what is kept of a sequence's tokens."""
