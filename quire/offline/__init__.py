"""What `LLM`, `AsyncLLM` and `LLMEngine` share: clusters of their own, adapters, progress."""
