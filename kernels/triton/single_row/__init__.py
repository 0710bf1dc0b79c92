"""The chain for decoding a single sequence: a kernel loads its weights while the one before it still runs (pdl.py)."""
