"""Bounds of HTTP bodies: size, values, depth and encoding, checked before they are parsed."""
