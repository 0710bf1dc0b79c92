"""Turns logits into tokens: one feature per module, each with its own per-slot buffers; sampler.py lists them."""
