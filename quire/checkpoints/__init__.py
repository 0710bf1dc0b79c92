"""Checkpoints that are written again: quantized, or with an adapter in their weights."""
