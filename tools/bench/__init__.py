"""Benches that only developers of Quire need; `quire bench` has those of users."""
