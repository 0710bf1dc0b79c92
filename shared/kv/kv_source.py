"""Where KV of another worker can be had."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVSource:
    """One attachment of a worker: block ids mean nothing in another one."""

    worker_id: str
    address: str  # HOST:PORT
    epoch: int
