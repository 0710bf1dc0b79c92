"""Limits for what a worker may report in its hello, shared by workers and schedulers."""

MAX_BLOCKS = 2**21  # KV blocks, the null block included: 33 million tokens in blocks of 16
MAX_POOLED_ELEMENTS = 2**24  # of one sequence's vectors: 64 MiB
