"""Samples of one prompt: one computes it, the others take its blocks and go on from there.

While one sample is about to compute the prompt, its siblings wait outside of the queue, so that they hold nobody up.
In the step after the prompt is complete they come in with all of it cached: full blocks are shared, and the block that
the prompt ends in is copied, because each of them writes on in its own. Nobody computes but the prompt's last token,
whose logits everybody needs for a choice of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from services.scheduler.core.sequence import Family, Sequence

T = TypeVar("T")


class Siblings:
    """What a core knows of its families."""

    def __init__(self) -> None:
        self._computing: dict[Family, Sequence] = {}  # who computes the prompt, or waits to do so
        self._parked: dict[Family, list[Sequence]] = {}
        self._donors: dict[Family, list[int]] = {}  # slots whose prompt is computed, by steps planned before

    @property
    def num_parked(self) -> int:
        return sum(map(len, self._parked.values()))

    def parked(self) -> list[Sequence]:
        return [sequence for parked in self._parked.values() for sequence in parked]

    def parks(self, sequence: Sequence) -> bool:
        """Whether `sequence`, which could be queued, had better wait for a sibling."""
        family = sequence.family
        if family is None or not sequence.starts:
            return False
        if self._computing.setdefault(family, sequence) is sequence or sequence.asks_prompt_logprobs:
            return False
        self._parked.setdefault(family, []).append(sequence)
        return True

    def donor(self, sequence: Sequence) -> int | None:
        """A slot that has computed the prompt of `sequence`, which has nothing else yet."""
        if sequence.family is None or not sequence.starts or sequence.asks_prompt_logprobs:
            return None
        donors = self._donors.get(sequence.family)
        return donors[0] if donors else None

    def computed(self, slots: Iterable[int], sequences: Iterable[Sequence]) -> list[Sequence]:
        """A step is planned in which these complete their prompts: whoever need not wait any more, in order."""
        freed: list[Sequence] = []
        for slot, sequence in zip(slots, sequences, strict=True):
            family = sequence.family
            if family is not None:
                self._donors.setdefault(family, []).append(slot)
                if self._computing.get(family) is sequence:
                    del self._computing[family]
                    freed += self._parked.pop(family, [])
        return freed

    def left(self, sequence: Sequence, slot: int) -> None:
        """`sequence` gives up its slot."""
        if sequence.family is not None:
            _drop(self._donors, sequence.family, slot)

    def ended(self, sequence: Sequence) -> list[Sequence]:
        """`sequence` is over: siblings that waited for it, one of whom has to compute the prompt now."""
        family = sequence.family
        if family is None:
            return []
        self.unpark(sequence)
        if self._computing.get(family) is not sequence:
            return []
        del self._computing[family]
        return self._parked.pop(family, [])

    def unpark(self, sequence: Sequence) -> None:
        """It waits no longer, if it did."""
        if sequence.family is not None:
            _drop(self._parked, sequence.family, sequence)

    def clear(self) -> None:
        """Nobody runs or waits here."""
        self._computing.clear()
        self._parked.clear()
        self._donors.clear()


def _drop(lists: dict[Family, list[T]], family: Family, member: T) -> None:
    """Takes `member` out of its family's list, if it is there; empty lists go."""
    members = lists.get(family, [])
    if member in members:
        members.remove(member)
        if not members:
            del lists[family]
