"""Beam search: which sequences to keep, and their slots and blocks."""
