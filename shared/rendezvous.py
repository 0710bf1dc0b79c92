"""Rendezvous hashing (Thaler and Ravishankar, 1998): assigns keys to members so that a joining or leaving member
moves only its own keys."""

from __future__ import annotations

import hashlib


def weight(key: bytes, name: str) -> bytes:
    """Returns the weight of `name` for `key`, equal in every process; the key belongs to the member with the
    greatest weight."""
    return hashlib.sha256(key + name.encode()).digest()
