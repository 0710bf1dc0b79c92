"""Attention layers around an attention backend, and rotary positions."""
