"""Drafts of a step, as chains and as trees, and what they do to states."""
