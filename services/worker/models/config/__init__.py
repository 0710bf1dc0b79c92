"""Reads and checks config.json. Needs no torch."""
