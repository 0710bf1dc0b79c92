"""Chain of kernels for decoding a single sequence: each loads its weights while the previous one still runs
(pdl.py)."""
