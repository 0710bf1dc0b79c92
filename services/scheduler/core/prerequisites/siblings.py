"""Samples of one prompt: one computes it, the others take its blocks and go on from there.

While one sample is about to compute the prompt, its siblings are blocked, outside of the queue. In the step after the
prompt is complete they are admitted with all of it cached: full blocks are shared, and the block that the prompt ends
in is copied, because each of them writes on in its own. Only the prompt's last token is computed again, whose logits
each of them needs for a choice of its own.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.scheduler.core.prerequisites.port import Prerequisite, Requeue
from quire.services.scheduler.core.sequences.sequence import Family, Sequence


class Siblings(Prerequisite):
    """Families of one core. A sequence joins last of all that it waits for outside of the queue."""

    computes_prompt = True

    def __init__(self, requeue: Requeue) -> None:
        super().__init__()
        self._requeue = requeue
        self._computing: dict[Family, Sequence] = {}  # the sibling that computes the prompt, or waits to do so
        self._donors: dict[Family, dict[int, None]] = {}  # slots whose prompt is computed, by steps planned before

    @property
    def num_computing(self) -> int:
        """Families whose prompt is not computed yet."""
        return len(self._computing)

    def join(self, sequence: Sequence) -> bool:
        family = sequence.family
        if family is None or not sequence.starts:
            return True
        if self._computing.setdefault(family, sequence) is sequence or sequence.asks_prompt_logprobs:
            return True
        self._blocked.add(family, sequence)
        return False

    def leave(self, sequence: Sequence) -> None:
        """Forgets `sequence`. If it was to compute the prompt, the next of its siblings does that."""
        family = sequence.family
        if family is None:
            return
        self._blocked.remove(sequence)
        if self._computing.get(family) is not sequence:
            return
        del self._computing[family]
        blocked = self._blocked.on(family)
        if blocked:
            heir = self._computing[family] = blocked[0]
            self._blocked.remove(heir)
            self._requeue.restart(heir)

    def release_slot(self, sequence: Sequence) -> None:
        donors = None if sequence.family is None else self._donors.get(sequence.family)
        if donors is not None and sequence.family is not None:
            donors.pop(sequence.slot, None)
            if not donors:
                del self._donors[sequence.family]

    def prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        freed: list[Sequence] = []
        for sequence in sequences:
            family = sequence.family
            if family is not None:
                self._donors.setdefault(family, {})[sequence.slot] = None
                if self._computing.get(family) is sequence:
                    del self._computing[family]
                    freed += self._blocked.free(family)
        return freed

    def donor(self, sequence: Sequence) -> int | None:
        """Returns a slot that has computed the prompt of `sequence`, which has nothing else yet."""
        if sequence.family is None or not sequence.starts or sequence.asks_prompt_logprobs:
            return None
        return next(iter(self._donors.get(sequence.family, ())), None)
