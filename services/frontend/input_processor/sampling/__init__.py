"""Sampling parameters: their rules, and the messages that schedulers and workers read."""
