"""Attached to a scheduler: plans in, results out, and how the worker is."""
