"""Capacity of a worker: its limits and the KV groups of its model."""
