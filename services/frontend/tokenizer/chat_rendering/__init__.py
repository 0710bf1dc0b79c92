"""Rendering of messages to the text that the model reads, in child processes."""
