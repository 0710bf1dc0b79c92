"""Shapes in which the messages of a conversation are handed to a chat template, and the choice among them."""
