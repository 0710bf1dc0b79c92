"""Measurements of a worker: step and prompt times, expected answer lengths, and the limits derived from them."""
