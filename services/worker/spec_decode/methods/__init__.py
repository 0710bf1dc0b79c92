"""Drafting methods, one module per name of the setting; past_outputs.py is the index that suffix.py searches."""
