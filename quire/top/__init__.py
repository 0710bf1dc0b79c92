"""Text rendering of a cluster's status, from plain values."""
