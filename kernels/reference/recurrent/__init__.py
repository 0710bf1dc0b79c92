"""Recurrent layers: a state a sequence in place of keys and values."""
