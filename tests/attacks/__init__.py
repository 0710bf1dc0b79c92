"""Attacks on a frontend, and their effect on other clients."""
