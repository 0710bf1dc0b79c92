"""Loads checkpoint files into a model, at start and while it serves."""
