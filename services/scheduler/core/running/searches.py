"""Beam searches that hold slots, and the beams of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from quire.services.scheduler.core.sequences.beam_search import BeamCandidates, BeamChild, BeamSearchState
from quire.services.scheduler.core.sequences.sequence import Sequence


@dataclass(slots=True, eq=False)
class Beam:
    """Live beam in a slot, with the candidates that its last step returned."""

    sequence: Sequence
    candidates: BeamCandidates | None = None  # None: not returned yet

    @property
    def slot(self) -> int:
        return self.sequence.slot


@dataclass(slots=True, eq=False)
class RunningSearch:
    """Beam search that holds slots; its decision is applied in a later step than the one that led to it."""

    root: Sequence
    search: BeamSearchState
    beams: list[Beam] = field(default_factory=list)  # in the order of search.live before the decision
    decision: list[BeamChild] | None = None  # the decision to apply in a later step

    @property
    def num_reserved(self) -> int:
        """Number of slots that the search may still need."""
        return self.search.rules.width - len(self.beams)


class RunningSearches:
    """Index of running searches by their roots and by the sequences of their beams."""

    def __init__(self) -> None:
        self.by_root: dict[int, RunningSearch] = {}  # searches that hold slots, by the root's key
        self._by_beam_key: dict[int, tuple[RunningSearch, Beam]] = {}  # by the key of the beam's sequence

    def __iter__(self) -> Iterator[RunningSearch]:
        """Iterates over a snapshot of the searches; they may be removed meanwhile."""
        return iter(list(self.by_root.values()))

    @property
    def num_reserved(self) -> int:
        return sum(group.num_reserved for group in self.by_root.values()) if self.by_root else 0

    @property
    def num_tokens_wanted(self) -> int:
        """Number of tokens that the next step computes for beams of decided searches."""
        return sum(len(group.decision) for group in self.by_root.values() if group.decision is not None)

    def add(self, root: Sequence, search: BeamSearchState) -> RunningSearch:
        group = self.by_root[root.key] = RunningSearch(root, search)
        return group

    def add_beam(self, group: RunningSearch, beam: Beam) -> None:
        """Appends a beam to a search."""
        group.beams.append(beam)
        self._by_beam_key[beam.sequence.key] = group, beam

    def remove_beam(self, group: RunningSearch, beam: Beam) -> None:
        """Removes a beam that no child continues."""
        group.beams.remove(beam)
        del self._by_beam_key[beam.sequence.key]

    def is_running(self, group: RunningSearch) -> bool:
        return self.by_root.get(group.root.key) is group

    def find(self, key: int) -> tuple[RunningSearch, Beam] | None:
        """Returns the search and the beam of a sequence, by its key."""
        return self._by_beam_key.get(key)

    def root_of(self, key: int) -> Sequence | None:
        """Returns the root of the search that the sequence with this key is a beam of, or None."""
        found = self._by_beam_key.get(key)
        return None if found is None else found[0].root

    def slots_of(self, root: Sequence) -> list[int]:
        return [beam.slot for beam in self.by_root[root.key].beams]

    def remove(self, root: Sequence) -> list[Beam]:
        """Removes a search that has ended or is preempted; returns its beams. The slots stay occupied until the
        caller releases them."""
        beams = self.by_root.pop(root.key).beams
        for beam in beams:
            del self._by_beam_key[beam.sequence.key]
        return beams

    def clear(self) -> list[Sequence]:
        """Removes all searches of a worker that is gone; returns their roots."""
        roots = [group.root for group in self.by_root.values()]
        self.by_root.clear()
        self._by_beam_key.clear()
        return roots
