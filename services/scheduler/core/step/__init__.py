"""A step while schedule() builds it."""
