"""Decoder families, one per file."""
