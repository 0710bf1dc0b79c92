"""Identifies a worker from which KV can be fetched."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSource:
    """One attachment of a worker; block ids are valid only in this epoch."""

    worker_id: str
    address: str  # HOST:PORT
    epoch: int
