"""Life cycle of prerequisites, and the operations that they may request from the scheduler.

A sequence joins the prerequisites one after the other. The first one that is not ready blocks it; when that one is
done, the sequence joins the remaining ones. It runs when all of them are ready, and leaves all of them when it ends or
moves to another worker.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from operator import attrgetter
from typing import Protocol

from quire.services.scheduler.core.prerequisites.blocked import BlockedSequences
from quire.services.scheduler.core.sequences.sequence import Sequence


def _always(sequence: Sequence) -> bool:
    return True


class Prerequisite:
    """One kind of resource that sequences wait for. Subclasses override what concerns them, and are called only for
    sequences that they concern."""

    part = ""  # attribute of sequences that names what they wait for: those without it never do; empty: any may wait
    computes_prompt = False  # a sibling computes the prompt of a blocked sequence

    def __init__(self) -> None:
        self._blocked: BlockedSequences = BlockedSequences()
        self.concerns: Callable[[Sequence], object] = attrgetter(self.part) if self.part else _always

    @property
    def num_blocked(self) -> int:
        return len(self._blocked)

    def blocked(self) -> list[Sequence]:
        """Returns the sequences that wait for this prerequisite."""
        return list(self._blocked)

    def join(self, sequence: Sequence) -> bool:
        """Adds `sequence`; returns whether it need not wait. If it must, it is blocked from now on."""
        return True

    def rejoin(self, sequence: Sequence) -> bool:
        """Adds `sequence`, which was preempted and computes its prompt again; returns whether it need not wait."""
        return True

    def leave(self, sequence: Sequence) -> None:
        """Removes `sequence`, which has ended or moves to another worker, whether it has joined or not."""
        self._blocked.remove(sequence)

    def release_slot(self, sequence: Sequence) -> None:
        """Notes that `sequence` is about to lose its slot, because it ends, is preempted or migrates."""

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Returns the sequences that are unblocked because the step being planned completes the prompts of
        `sequences`."""
        return []

    def on_computed(self, sequence: Sequence, *, failed: bool) -> list[Sequence]:
        """Handles the result of an internal sequence; returns the sequences that cannot run because it failed."""
        return []

    def dependents(self, sequence: Sequence) -> list[Sequence]:
        """Returns the sequences that are blocked until the internal `sequence` is computed."""
        return []

    def check_invariant(self) -> None:
        """Raises AssertionError if counters and contents differ."""
        self._blocked.check_invariant()


class BlockSource(Prerequisite, ABC):
    """Source of KV blocks outside the device. A sequence joins it when it is next to run."""

    @property
    def is_available(self) -> bool:
        """Whether blocks can come from this source."""
        return True

    @abstractmethod
    def fetch(self, sequence: Sequence, found: Seq[int], most: int) -> bool:
        """Orders what follows the blocks `found` on the device, at most `most` block positions. Returns whether
        `sequence` is blocked until it is here."""

    def admitted(self, sequence: Sequence, num_found: int) -> None:
        """Notes the first admission of `sequence`, with `num_found` block positions cached on the device."""


class InternalSequences(Protocol):
    """Runs sequences on behalf of other sequences; clients do not see them."""

    def submit(self, sequence: Sequence) -> None:
        """Queues an internal sequence of a prerequisite."""

    def withdraw(self, sequence: Sequence) -> None:
        """Cancels an internal sequence, whatever its state; it need not have been submitted."""


class Requeue(Protocol):
    """Operations on waiting sequences that prerequisites may request."""

    def block(self, sequence: Sequence) -> None:
        """Blocks a sequence that was ready to run."""

    def raise_priority(self, sequence: Sequence, priority: int) -> None:
        """Gives `sequence` a more urgent priority."""

    def restart(self, sequence: Sequence) -> None:
        """Queues a blocked sequence again; it computes all of its prompt."""
