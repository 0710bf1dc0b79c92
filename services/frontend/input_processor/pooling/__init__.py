"""Pooled prompts: vectors, classes, scores and late interaction."""
