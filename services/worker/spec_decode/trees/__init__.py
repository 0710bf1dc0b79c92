"""Drafts of a sequence as a tree instead of a chain: several guesses of a token, each with guesses of the next."""
