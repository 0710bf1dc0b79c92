"""Ranks of a replica: every rank receives each plan, and rank 0 answers the scheduler."""
