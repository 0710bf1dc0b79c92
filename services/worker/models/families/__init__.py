"""Decoders, one family a file."""
