"""Rewriting of checkpoints: quantization, and merging of adapters."""
