"""Requests in the form that all edges produce: prompts, conversations, tools, sampling parameters."""
