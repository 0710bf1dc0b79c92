"""Parsers of values that models write as JSON, Python and plain text; they stream repaired JSON."""
