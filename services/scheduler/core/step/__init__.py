"""A step while schedule() puts it together."""
