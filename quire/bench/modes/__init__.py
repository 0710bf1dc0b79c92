"""Modes of `quire bench`, one module each."""
