"""Blocked sequences, indexed by the entry that they wait for."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from quire.services.scheduler.core.sequences.sequence import Sequence


class BlockedSequences:
    """Index of blocked sequences; each waits for one entry: a grammar, a query, a sample group or a transfer. Every
    change takes constant time."""

    def __init__(self) -> None:
        self._by_entry: dict[Hashable, dict[int, Sequence]] = {}  # by key, in order of arrival
        self._entry_of: dict[int, Hashable] = {}  # by key

    def __len__(self) -> int:
        return len(self._entry_of)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for sequences in self._by_entry.values() for sequence in sequences.values())

    def add(self, entry: Hashable, sequence: Sequence) -> None:
        """Blocks `sequence` on `entry` until free() names the entry or remove() the sequence; replaces the entry
        that it was blocked on before."""
        self.remove(sequence)
        self._by_entry.setdefault(entry, {})[sequence.key] = sequence
        self._entry_of[sequence.key] = entry

    def remove(self, sequence: Sequence) -> bool:
        """Removes `sequence`; returns whether it was blocked."""
        entry = self._entry_of.pop(sequence.key, None)
        if entry is None:
            return False
        sequences = self._by_entry[entry]
        del sequences[sequence.key]
        if not sequences:
            del self._by_entry[entry]
        return True

    def on(self, entry: Hashable) -> list[Sequence]:
        """Returns the sequences that wait for an entry, in order of arrival."""
        return list(self._by_entry.get(entry, {}).values())

    def free(self, entry: Hashable) -> list[Sequence]:
        """Removes and returns the sequences that wait for an entry, in order of arrival."""
        freed = list(self._by_entry.pop(entry, {}).values())
        for sequence in freed:
            del self._entry_of[sequence.key]
        return freed

    def check_invariant(self) -> None:
        """Raises AssertionError if the two indices differ."""
        found = {key: entry for entry, sequences in self._by_entry.items() for key in sequences}
        assert found == self._entry_of, "each blocked sequence is on record under its entry"
        assert all(self._by_entry.values()), "entries without sequences are removed"
