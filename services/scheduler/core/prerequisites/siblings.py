"""Samples of one prompt: one computes it, the others take its blocks and go on from there.

While one sample is about to compute the prompt, its siblings wait outside of the queue, so that they hold nobody up.
In the step after the prompt is complete they come in with all of it cached: full blocks are shared, and the block that
the prompt ends in is copied, because each of them writes on in its own. Nobody computes but the prompt's last token,
whose logits everybody needs for a choice of their own.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

from quire.services.scheduler.core.sequences.sequence import Family, Sequence

T = TypeVar("T")


class Siblings:
    """What a core knows of its families. Whoever comes, goes or ends costs the same, however many there are."""

    def __init__(self) -> None:
        self._computing: dict[Family, Sequence] = {}  # who computes the prompt, or waits to do so
        self._parked: dict[Family, dict[int, Sequence]] = {}  # by key, in the order in which they came
        self._donors: dict[Family, dict[int, None]] = {}  # slots whose prompt is computed, by steps planned before
        self.num_parked = 0

    def parked(self) -> list[Sequence]:
        return [sequence for parked in self._parked.values() for sequence in parked.values()]

    def parks(self, sequence: Sequence) -> bool:
        """Whether `sequence`, which could be queued, had better wait for a sibling."""
        family = sequence.family
        if family is None or not sequence.starts:
            return False
        if self._computing.setdefault(family, sequence) is sequence or sequence.asks_prompt_logprobs:
            return False
        self._parked.setdefault(family, {})[sequence.key] = sequence
        self.num_parked += 1
        return True

    def donor(self, sequence: Sequence) -> int | None:
        """A slot that has computed the prompt of `sequence`, which has nothing else yet."""
        if sequence.family is None or not sequence.starts or sequence.asks_prompt_logprobs:
            return None
        return next(iter(self._donors.get(sequence.family, ())), None)

    def computed(self, slots: Iterable[int], sequences: Iterable[Sequence]) -> list[Sequence]:
        """A step is planned in which these complete their prompts: whoever need not wait any more, in order."""
        freed: list[Sequence] = []
        for slot, sequence in zip(slots, sequences, strict=True):
            family = sequence.family
            if family is not None:
                self._donors.setdefault(family, {})[slot] = None
                if self._computing.get(family) is sequence:
                    del self._computing[family]
                    freed += self._parked.pop(family, {}).values()
        self.num_parked -= len(freed)
        return freed

    def left(self, sequence: Sequence, slot: int) -> None:
        """`sequence` gives up its slot."""
        if sequence.family is not None:
            _drop(self._donors, sequence.family, slot)

    def ended(self, sequence: Sequence) -> Sequence | None:
        """`sequence` is over: the sibling that has to compute the prompt now, if it was to do that. The others go on
        waiting."""
        family = sequence.family
        if family is None:
            return None
        self.unpark(sequence)
        if self._computing.get(family) is not sequence:
            return None
        del self._computing[family]
        parked = self._parked.get(family)
        if parked is None:
            return None
        heir = next(iter(parked.values()))
        self.unpark(heir)
        self._computing[family] = heir
        return heir

    def unpark(self, sequence: Sequence) -> None:
        """It waits no longer, if it did."""
        if sequence.family is not None:
            self.num_parked -= _drop(self._parked, sequence.family, sequence.key)


def _drop(tables: dict[Family, dict[int, T]], family: Family, member: int) -> bool:
    """Takes `member` out of its family's table; whether it was there. Empty tables go."""
    table = tables.get(family)
    if table is None or member not in table:
        return False
    del table[member]
    if not table:
        del tables[family]
    return True
