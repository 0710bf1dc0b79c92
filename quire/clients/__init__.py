"""Shared parts of `Client` and `AsyncClient`: calls, files and batches, keys, and the admin service."""
