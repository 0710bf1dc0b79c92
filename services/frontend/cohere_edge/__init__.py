"""Cohere's embeddings: /v2/embed and /v1/embed. Its /v2/rerank has the same form as Jina's."""
