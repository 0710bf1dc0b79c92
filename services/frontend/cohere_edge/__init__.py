"""Cohere's embeddings: /v2/embed and /v1/embed. Its /v2/rerank looks as Jina's."""
