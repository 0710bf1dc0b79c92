"""Validation of constraints on the output, in a process of its own."""
