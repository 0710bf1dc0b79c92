"""Offline work: files, and batches of calls whose answers are files."""
