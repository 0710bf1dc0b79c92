"""Limits on HTTP bodies: size, number of values, depth and encoding, checked before parsing."""
