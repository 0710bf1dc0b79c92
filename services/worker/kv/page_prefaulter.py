"""Prefaulting of host memory pages before a step writes them.

The kernel zeroes a page on its first write, which a virtual machine may take 5 ms for with huge pages. Keys and values
of all layers reach the end of a page together: one decode step of a small model waited 80 ms for 16 pages, and one of
Qwen3-0.6B would wait for 56."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Iterable

from torch import Tensor

from quire.services.worker.kv.kv_cache import HUGE_PAGE, LayerCache


class PagePrefaulter:
    """Prefaults the pages of blocks on its own thread, ahead of the steps; a fresh pool allocates blocks in about
    ascending order. Blocks below the highest one so far cost nothing."""

    def __init__(self, caches: Iterable[LayerCache]) -> None:
        """Starts the thread, which ends with this object, and requests the first pages. `caches`: in host memory;
        caches of several groups may share it."""
        parts = {part.data_ptr(): part for cache in caches for part in cache.parts}
        self._parts = list(parts.values())
        self._block_bytes = max((part[0].nbytes for part in self._parts), default=0)
        self._num_bytes = max((part.nbytes for part in self._parts), default=0)
        self._asked = 0  # requested bytes of each part
        self._wanted: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
        threading.Thread(target=_touch, args=(self._wanted, self._parts), name="pages", daemon=True).start()
        weakref.finalize(self, self._wanted.put, None)
        self.prefault_for(0)

    def prefault_for(self, block: int) -> None:
        """Requests the next huge page of each part once `block`, which a step will write, lies in the second half of
        the last requested one. Returns at once."""
        used = (block + 1) * self._block_bytes
        if used + HUGE_PAGE // 2 <= self._asked or self._asked >= self._num_bytes:
            return
        end = min(-(-(used + HUGE_PAGE // 2) // HUGE_PAGE) * HUGE_PAGE, self._num_bytes)
        self._wanted.put((self._asked, end))
        self._asked = end


def _touch(wanted: queue.SimpleQueue[tuple[int, int] | None], parts: list[Tensor]) -> None:
    """Thread body: prefaults byte spans [start, end) of all parts until None, one huge page at a time, so that other
    memory requests of the process wait for one page at most."""
    from quire.kernels import cpu

    while (span := wanted.get()) is not None:
        start, end = span
        for begin in range(start, end, HUGE_PAGE):
            for part in parts:
                cpu.populate(part, begin, min(begin + HUGE_PAGE, end, part.nbytes))
