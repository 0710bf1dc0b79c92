"""Drafts as trees instead of chains: several guesses of a token, each with guesses of the next."""
