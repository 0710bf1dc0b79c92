"""What main.py composes: rooms with one owner of state each, the only files that name concrete classes."""
