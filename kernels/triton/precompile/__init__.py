"""Compiles kernels ahead of use: whether (precompile.py), which (calls.py) and how (processes.py)."""
