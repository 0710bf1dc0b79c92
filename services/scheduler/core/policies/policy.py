"""What every policy decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from quire.services.scheduler.core.running.running import Mask, Running, Slots
from quire.services.scheduler.core.sequences.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PolicyOptions:
    """What operators may say of policies; each reads what concerns it."""

    priority_aging_s: float = 0.0  # waited, as much as a level of priority; 0: priorities do not age
    tenant_weights: Mapping[str, float] = field(default_factory=dict)  # shares of tenants; 1 if not named


DEFAULTS = PolicyOptions()


class Policy(Protocol):
    """The waiting sequences in their order, the choice of victims, and the account of what was served."""

    def push(self, sequence: Sequence) -> None:
        """A new sequence."""

    def push_back(self, sequence: Sequence) -> None:
        """One that was preempted: next among its equals."""

    def peek(self) -> Sequence:
        """The next one; only while there are some."""

    def pop(self) -> Sequence: ...

    def remove(self, sequence: Sequence) -> None: ...

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...

    def victim(self, running: Running) -> int:
        """The slot to take blocks from; only while something runs."""

    def counted(self, running: Running, newcomer: Sequence) -> Mask:
        """The running sequences whose growth `newcomer` has to leave room for: all that would not be preempted for
        it."""

    def charge_prompt(self, sequence: Sequence, num_uncached_tokens: int) -> None:
        """`sequence` is admitted for the first time."""

    def charge_output(self, running: Running, slots: Slots) -> None:
        """Each of `slots` samples a token."""


PolicyMaker = Callable[[PolicyOptions], Policy]


def least_work_lost(running: Running, candidates: Slots) -> int:
    """Of the candidates, the slot with the fewest computed tokens, the newest of equals; the sequence that arrived
    first is spared while there is another, so that somebody always gets done."""
    later = candidates[running.order[candidates] != running.order[running.live].min()]
    if len(later):  # else there is one sequence alone, perhaps with all its beams
        candidates = later
    by_work = np.lexsort((-running.order[candidates], running.num_computed[candidates]))
    return int(candidates[by_work[0]])
