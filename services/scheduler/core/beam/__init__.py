"""Beam search: selection of the beams to continue, and their slots and blocks."""
