"""Conversion between text, tokens and messages, as the model's folder defines it."""
