"""Interface that every scheduling policy implements."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.services.scheduler.core.running.running import Mask, Running, Slots
from quire.services.scheduler.core.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """Operator settings for policies; each policy reads those that concern it."""

    priority_aging_s: float = 0.0  # seconds of waiting that are worth one level of priority; 0: priorities do not age
    tenant_weights: Mapping[str, float] = field(
        default_factory=dict
    )  # shares of tenants; 1 for tenants that are not named


DEFAULTS = PolicyOptions()


class Policy(Protocol):
    """Order of the waiting sequences, choice of preemption victims, and accounting of served tokens."""

    def push(self, sequence: Sequence) -> None:
        """Appends a new sequence to the waiting queue."""

    def push_back(self, sequence: Sequence) -> None:
        """Returns a preempted sequence to the queue, ahead of sequences of equal rank."""

    def peek(self) -> Sequence:
        """Returns the next sequence; only valid while the queue is not empty."""

    def next_for(self, running: Running) -> Sequence | None:
        """Returns the next sequence that may take a free slot, which peek() and pop() return as well; None if there is
        none. Passes over tenants for which the last slots are not reserved, until end_admission()."""

    def end_admission(self) -> None:
        """Ends the admission of a step: no tenant is passed over any more."""

    def pop(self) -> Sequence: ...

    def remove(self, sequence: Sequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def victim(self, running: Running) -> int:
        """Returns the slot to preempt; only valid while sequences run."""

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        """Returns the running sequences that would not be preempted for `newcomer`, so that admission has to leave room
        for their growth."""

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        """Charges the uncached prompt tokens of `sequence` at its first admission."""

    def charge_output(self, running: Running, slots: Slots) -> None:
        """Charges one sampled token to each of `slots`."""


PolicyMaker = Callable[[PolicyOptions], Policy]


def least_work_lost(running: Running, candidates: Slots) -> int:
    """Returns the candidate slot with the fewest computed tokens, the newest of equals. The sequence that arrived first
    is spared while there is another candidate, so that at least one sequence always finishes."""
    later = candidates[running.order[candidates] != running.order[running.live].min()]
    if len(later):  # otherwise a single sequence runs, perhaps with all its beams
        candidates = later
    by_work = np.lexsort((-running.order[candidates], running.num_computed[candidates]))
    return int(candidates[by_work[0]])
