"""Conversion between frontend messages and sequences: submissions, and one TokenBatch per step."""
