"""Sequences that no worker can take at present. They wait, in order of arrival, until their deadline."""

from __future__ import annotations

from collections.abc import Iterator

from quire.services.scheduler.core.sequences.sequence import Sequence


class UnassignedSequences:
    """FIFO of sequences without a worker."""

    def __init__(self) -> None:
        self._waiting: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._waiting.values()))

    def __contains__(self, key: int) -> bool:
        return key in self._waiting

    def add(self, sequence: Sequence) -> None:
        self._waiting[sequence.key] = sequence

    def remove(self, key: int) -> Sequence:
        return self._waiting.pop(key)

    def expired(self, now: float) -> list[Sequence]:
        return [sequence for sequence in self._waiting.values() if sequence.deadline <= now]
