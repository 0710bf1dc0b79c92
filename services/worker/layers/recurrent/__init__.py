"""Recurrent layers, which keep a state of fixed size."""
