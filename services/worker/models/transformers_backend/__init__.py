"""Decoders without code of their own: that of the installed transformers, with our attention."""
