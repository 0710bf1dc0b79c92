"""Formats in which model families write tool calls: one file each, with a constant `FORMAT`."""
