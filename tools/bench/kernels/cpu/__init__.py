"""Benchmarks of quire.kernels.cpu against torch and the reference."""
