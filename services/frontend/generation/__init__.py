"""Accepted requests: their samples, and what an edge reads of them."""
