"""Checks of settings against the abilities of model, device and ranks."""
