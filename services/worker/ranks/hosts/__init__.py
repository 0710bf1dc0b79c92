"""Ranks of a replica that are on other hosts than rank 0."""
