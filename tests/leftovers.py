"""What tests leave in memory: models refer to themselves, and Python looks for such by their number, not their size."""

from __future__ import annotations

import gc
import mmap
from collections.abc import Callable
from pathlib import Path

MUCH = 256 << 20  # bytes; a search for them takes 50 ms and more


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


class Leftovers:
    """Searched for when a process has grown by much since it was as small as it gets."""

    def __init__(self, size: Callable[[], int] = resident_bytes) -> None:
        self._size = size
        self._least = size()

    def let_go(self) -> None:
        size = self._size()
        if size > self._least + MUCH:
            gc.collect()
            self._least = size = self._size()
        self._least = min(self._least, size)
