"""Speculative decoding: how much each sequence may draft, and what came of it."""
