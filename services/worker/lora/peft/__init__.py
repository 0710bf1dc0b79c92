"""Finds, checks and reads adapters in PEFT's format."""
