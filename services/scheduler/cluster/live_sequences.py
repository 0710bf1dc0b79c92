"""Unfinished sequences by owner and id."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.shared.models.adapter_ids import AdapterId

NONE: Mapping[int, Sequence] = {}


class LiveSequences:
    """Sequences from submission to end, by the frontend session that owns them. All outputs of a beam search map to its
    root."""

    def __init__(self) -> None:
        self._of: dict[int, dict[int, Sequence]] = {}  # owner -> sequence id -> sequence

    def __iter__(self) -> Iterator[Sequence]:
        """Iterates over the sequences; a sequence with several ids occurs several times."""
        for sequences in self._of.values():
            yield from sequences.values()

    @property
    def owners(self) -> list[int]:
        return list(self._of)

    def add_owner(self, owner: int) -> None:
        self._of[owner] = {}

    def remove_owner(self, owner: int) -> None:
        del self._of[owner]

    def of(self, owner: int) -> Mapping[int, Sequence]:
        """Returns the sequences of an owner by id; none for an unknown owner."""
        return self._of.get(owner, NONE)

    def add(self, sequence: Sequence) -> None:
        sequences = self._of[sequence.owner]
        for output in sequence.outputs or (sequence,):
            sequences[output.sequence_id] = sequence

    def remove(self, owner: int, sequence_id: int) -> Sequence | None:
        """Removes and returns a sequence that has ended; None if it was removed before."""
        sequences = self._of.get(owner)
        return None if sequences is None else sequences.pop(sequence_id, None)

    def num_users(self, adapter: AdapterId) -> int:
        return sum(sequence.adapter == adapter for sequence in self)

    @property
    def num_begun(self) -> int:
        """Number of sequences with output tokens."""
        return sum(sequence.has_output for sequence in self)
