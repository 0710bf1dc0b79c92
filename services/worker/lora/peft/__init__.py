"""Adapters as PEFT stores them: found, checked and read."""
