"""Formats in which model families write reasoning: one file each, with a constant `FORMAT`."""
