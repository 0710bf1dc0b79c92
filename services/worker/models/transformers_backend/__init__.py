"""Transformers backend: decoders without native code run that of transformers with paged attention."""
