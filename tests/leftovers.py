"""Frees what tests leave in memory: models contain reference cycles, and Python's collector counts objects, not
bytes."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

MUCH = 256 << 20  # bytes; a search for them takes 50 ms and more


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Leftovers:
    """Runs a collection when the process has grown by much since its smallest size."""

    def __init__(self, size: Callable[[], int] = resident_bytes, collect: Callable[[], object] = gc.collect) -> None:
        self._size, self._collect = size, collect
        self._least = size()

    def let_go(self) -> None:
        size = self._size()
        if size > self._least + MUCH:
            self._collect()
            self._least = size = self._size()
        self._least = min(self._least, size)
