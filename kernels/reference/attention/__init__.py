"""Attention over cached keys and values, and what goes into the cache."""
