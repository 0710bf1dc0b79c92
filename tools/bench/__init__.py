"""Benchmarks for developers of Quire; those for users are in `quire bench`."""
