"""What goes between rank 0's host and another one, once they know each other.

To the other: a welcome, then commands as ranks read them (ranks/wire.py); an empty frame says that rank 0 is there.
From it: a letter, then an answer of a rank, the heartbeats of all its ranks, or why it cannot go on.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from typing import Any

ANSWER, HEARTBEATS, FAILURE = b"A", b"P", b"F"
RANK = struct.Struct("<I")
HEARTBEAT = struct.Struct("<IQ")
KEEPALIVE = b""
HEARTBEAT_INTERVAL_S = 0.5


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a host has to know."""

    version: str
    model: str  # hex of what both must serve, and of the weights
    host: str  # where ranks meet
    port: int
    size: int
    stages: int
    contexts: int
    per_host: int
    settings: dict[str, Any]

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, frame: bytes) -> Welcome:
        return cls(**json.loads(frame))


def answer(rank: int, reply: bytes) -> bytes:
    return ANSWER + RANK.pack(rank) + reply


def heartbeats(by_rank: dict[int, int]) -> bytes:
    return HEARTBEATS + b"".join(HEARTBEAT.pack(rank, heartbeat) for rank, heartbeat in by_rank.items())


def read_heartbeats(body: bytes) -> dict[int, int]:
    return dict(HEARTBEAT.iter_unpack(body))
