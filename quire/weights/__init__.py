"""Weights that a program sends to the workers of a cluster: as a stream, or through memory of their host."""
