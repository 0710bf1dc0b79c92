"""Streams that outlive the calls of their clients."""
