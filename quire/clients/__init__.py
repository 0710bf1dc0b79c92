"""What `Client` and `AsyncClient` share: their calls, files and batches, keys, and the admin service."""
