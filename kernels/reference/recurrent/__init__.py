"""Recurrent layers: a state per sequence instead of keys and values."""
