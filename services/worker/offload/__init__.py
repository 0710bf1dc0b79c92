"""KV blocks below host memory, and what a worker that is started again finds of an earlier life."""
