"""Sequences that wait for a slot, in the order they will get one."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from services.scheduler.core.sequence import Sequence


class WaitingQueue(Protocol):
    """A policy's order."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence."""

    def push_back(self, sequence: Sequence) -> None:
        """One that was preempted."""

    def peek(self) -> Sequence: ...

    def pop(self) -> Sequence: ...

    def remove(self, sequence: Sequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class FcfsQueue:
    """First come, first served; a preempted sequence returns to the head."""

    def __init__(self) -> None:
        self._queue: OrderedDict[int, Sequence] = OrderedDict()

    def push(self, sequence: Sequence) -> None:
        self._queue[sequence.key] = sequence

    def push_back(self, sequence: Sequence) -> None:
        self._queue[sequence.key] = sequence
        self._queue.move_to_end(sequence.key, last=False)

    def peek(self) -> Sequence:
        return next(iter(self._queue.values()))

    def pop(self) -> Sequence:
        return self._queue.popitem(last=False)[1]

    def remove(self, sequence: Sequence) -> None:
        del self._queue[sequence.key]

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._queue.values())
