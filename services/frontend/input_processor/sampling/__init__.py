"""Sampling parameters: their rules, and their messages for schedulers and workers."""
