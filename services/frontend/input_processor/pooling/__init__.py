"""Preparation of pooled prompts: vectors, classes, scores and late interaction."""
