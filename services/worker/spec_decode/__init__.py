"""Speculative decoding (docs/features/speculative-decoding.md)."""
