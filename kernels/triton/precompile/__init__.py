"""Compiles kernels before they are called: whether (precompile.py), which (calls.py) and how (processes.py)."""
