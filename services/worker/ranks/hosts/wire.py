"""Messages between rank 0's host and another host after the handshake.

Rank 0's host sends a welcome, then commands in the format of ranks/wire.py; an empty frame is a keepalive. The other
host sends a type byte followed by a rank's answer, the heartbeats of all its ranks, or the reason why it cannot
continue."""

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
    """Parameters of a host's ranks, sent by rank 0."""

    version: str
    model: str  # hex of the model's identity and of its weights, equal on all hosts
    host: str  # rendezvous address of the ranks
    port: int
    size: int
    stages: int
    contexts: int
    per_host: int
    settings: dict[str, Any]

    def to_bytes(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def parse(cls, frame: bytes) -> Welcome:
        return cls(**json.loads(frame))


def answer(rank: int, reply: bytes) -> bytes:
    """Returns the frame with a rank's encoded reply."""
    return ANSWER + RANK.pack(rank) + reply


def heartbeats(by_rank: dict[int, int]) -> bytes:
    """Returns the frame with the heartbeat counters of a host's ranks."""
    return HEARTBEATS + b"".join(HEARTBEAT.pack(rank, heartbeat) for rank, heartbeat in by_rank.items())


def read_heartbeats(body: bytes) -> dict[int, int]:
    """Returns heartbeat counters by rank from a frame without its type byte."""
    return dict(HEARTBEAT.iter_unpack(body))
