"""Benchmarks of kernels against the functions that they replace."""
