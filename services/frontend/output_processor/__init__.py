"""Conversion of tokens to what a client reads: text, stop strings, log-probabilities, merged while the client is
slow."""
