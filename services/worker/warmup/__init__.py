"""Startup work concurrent with loading a model: imports and kernel compilation."""
