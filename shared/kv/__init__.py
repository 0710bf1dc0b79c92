"""KV blocks as schedulers and workers share them: hashes, KV specs and retention rules."""
