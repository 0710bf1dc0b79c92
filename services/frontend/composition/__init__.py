"""Composition root: groups of parts that main.py assembles; the only files that name concrete classes."""
