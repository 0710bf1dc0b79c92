"""Attention over cached keys and values, and the preparation of its inputs."""
