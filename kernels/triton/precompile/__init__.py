"""Kernels are compiled before they are called: whether (precompile.py), which (jobs.py) and how (processes.py)."""
