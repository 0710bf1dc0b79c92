"""Validation of output constraints in child processes."""
