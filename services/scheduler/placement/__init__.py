"""Placement of sequences on workers, and the KV blocks that workers fetch from each other."""
