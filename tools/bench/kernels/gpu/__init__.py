"""Benchmarks of quire.kernels.triton against torch, or the hardware's limits."""
