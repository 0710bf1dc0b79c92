"""Adapters (LoRA) for quire-tiny: two manners of answering, on top of what it knows."""
