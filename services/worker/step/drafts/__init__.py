"""Drafts of a step, as chains and as trees, and their effect on recurrent states."""
