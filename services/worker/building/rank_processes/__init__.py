"""Processes of the other ranks, on this host and on hosts without a scheduler."""
