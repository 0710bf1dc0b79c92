"""Shared parts of `LLM`, `AsyncLLM` and `LLMEngine`: embedded clusters, adapters, progress."""
