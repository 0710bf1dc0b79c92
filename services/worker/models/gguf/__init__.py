"""Reads tensors of GGUF files under the names and in the layout of transformers."""
