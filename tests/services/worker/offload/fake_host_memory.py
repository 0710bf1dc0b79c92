"""Fake host memory of few bytes, and helpers that wait for transfers."""

from __future__ import annotations

import queue
from collections import Counter

import numpy as np
import numpy.typing as npt

from quire.services.worker.offload.disk_moves import DiskMove
from quire.services.worker.offload.disk_store import DiskStore
from quire.shared.kv.block_hash import page_name

MOVE_TIMEOUT_S = 60.0


class FakeHostMemory:
    def __init__(self, num_places: int = 8, block_bytes: int = 64) -> None:
        self.block_bytes = block_bytes
        self.rows = np.zeros((num_places, block_bytes), dtype=np.uint8)
        self.names: dict[int, bytes] = {}

    def row(self, place: int) -> npt.NDArray[np.uint8]:
        return self.rows[place]

    def put(self, place: int, name: bytes, content: bytearray) -> None:
        self.rows[place] = np.frombuffer(content, dtype=np.uint8)
        self.names[place] = name


class DiskRecorder:
    """Records the store's callbacks."""

    def __init__(self) -> None:
        self.failures: Counter[tuple[str, str]] = Counter()
        self.num_bytes: Counter[str] = Counter()

    def wrote(self, num_bytes: int) -> None:
        self.num_bytes["write"] += num_bytes

    def on_read(self, num_bytes: int) -> None:
        self.num_bytes["read"] += num_bytes

    def failed(self, what: str, reason: str) -> None:
        self.failures[what, reason] += 1


def name(number: int) -> bytes:
    """Names of pages in three KV groups."""
    return page_name(bytes([number]) * 32, number % 3)


def move(store: DiskStore, places: list[int], on_disk: list[int], numbers: list[int], *, to_disk: bool) -> list[int]:
    """Executes a transfer; returns the blocks that failed."""
    answers: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    store.start_move(DiskMove(to_disk, places, on_disk, [name(n) for n in numbers]), lambda lost, _: answers.put(lost))
    return answers.get(timeout=MOVE_TIMEOUT_S)
