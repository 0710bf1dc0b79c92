"""Shapes in which messages are passed to a chat template, and the selection among them."""
