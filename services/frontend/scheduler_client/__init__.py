"""Submits sequences to schedulers, moves them when a session breaks, and ends each exactly once."""
