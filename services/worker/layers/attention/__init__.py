"""Attention layers, each around an attention backend, and the positions that they rotate by."""
