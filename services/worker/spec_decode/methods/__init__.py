"""The methods that the setting names, each in a file of its name (past_outputs.py: what suffix.py searches)."""
