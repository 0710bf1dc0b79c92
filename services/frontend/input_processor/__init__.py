"""Preparation of client requests: checks, defaults, tokenization and hashing."""
