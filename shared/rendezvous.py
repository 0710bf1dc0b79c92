"""Rendezvous hashing (Thaler and Ravishankar, 1998): where a key belongs among those that are there, so that whoever
comes or goes moves only the keys that come to it or were with it."""

from __future__ import annotations

import hashlib


def weight(key: bytes, name: str) -> bytes:
    """How much `key` belongs to `name`: it is at home where this is greatest. The same in every process."""
    return hashlib.sha256(key + name.encode()).digest()
