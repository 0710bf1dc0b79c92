"""Attention over paged keys and values or latent vectors, and the preparation of its inputs."""
