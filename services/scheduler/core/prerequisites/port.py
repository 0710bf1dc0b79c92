"""The life cycle that all prerequisites share, and what they may ask of the scheduler.

A sequence joins the prerequisites one after the other. The first one that is not ready blocks it; when that is done,
the sequence goes on from there. It runs when all of them are ready, and leaves all of them when it ends or goes
elsewhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from typing import Protocol

from quire.services.scheduler.core.prerequisites.blocked import BlockedSequences
from quire.services.scheduler.core.sequences.sequence import Sequence


class Prerequisite:
    """One kind of thing that sequences wait for. Subclasses override what concerns them."""

    computes_prompt = False  # the prompt of a blocked sequence is computed by another one

    def __init__(self) -> None:
        self._blocked: BlockedSequences = BlockedSequences()

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    def blocked(self) -> list[Sequence]:
        """Returns the sequences that wait for this prerequisite."""
        return list(self._blocked)

    def join(self, sequence: Sequence) -> bool:
        """Returns whether `sequence` need not wait; if it must, it is blocked from here on."""
        return True

    def leave(self, sequence: Sequence) -> None:
        """Forgets `sequence`, which has ended or goes elsewhere, whether it has joined or not."""
        self._blocked.remove(sequence)

    def release_slot(self, sequence: Sequence) -> None:
        """Notes that `sequence` is about to give up its slot, because it ends, is preempted or goes elsewhere."""

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Returns the sequences that come next because the step being planned completes the prompts of `sequences`."""
        return []

    def on_computed(self, sequence: Sequence, *, failed: bool) -> list[Sequence]:
        """Takes the result of an internal sequence; returns the sequences that cannot run because it failed."""
        return []

    def dependents(self, sequence: Sequence) -> list[Sequence]:
        """Returns the sequences that are blocked until the internal `sequence` is computed."""
        return []

    def check_invariant(self) -> None:
        """Raises AssertionError if what is counted and what is there differ."""
        self._blocked.check_invariant()


class BlockSource(Prerequisite, ABC):
    """A place outside the device that KV blocks come from. A sequence joins it when it is the next to run."""

    @property
    def is_available(self) -> bool:
        """Whether blocks may come from there at all."""
        return True

    @abstractmethod
    def fetch(self, sequence: Sequence, found: Seq[int], most: int) -> bool:
        """Orders what follows the blocks `found` on the device, at most `most` block positions. Returns whether
        `sequence` is blocked until that is here."""

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """Notes that `sequence` is admitted for the first time, after `num_found` block positions on the device."""


class InternalSequences(Protocol):
    """Sequences that the scheduler runs for others, and no client knows."""

    def submit(self, sequence: Sequence) -> None:
        """Queues an internal sequence."""

    def withdraw(self, sequence: Sequence) -> None:
        """Takes an internal sequence back, wherever it is; it need not have been submitted."""


class Requeue(Protocol):
    """Changes of sequences that wait."""

    def block(self, sequence: Sequence) -> None:
        """Blocks a sequence that could run until now."""

    def raise_priority(self, sequence: Sequence, priority: int) -> None:
        """Gives `sequence` a more urgent priority."""

    def restart(self, sequence: Sequence) -> None:
        """Queues a blocked sequence again, which computes all of its prompt."""
