"""Attention over keys and values, or latent vectors, that lie in blocks, and what goes into them."""
