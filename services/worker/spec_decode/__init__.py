"""Speculative decoding: see README.md."""
