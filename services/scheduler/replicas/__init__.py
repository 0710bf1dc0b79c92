"""Attached workers: one core and one stream each."""
