"""Blocks that move between a worker's device, its host memory and its disk."""
