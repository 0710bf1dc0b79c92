"""Attention backends: implementations of one port, each of which reports why it cannot serve a model."""
