"""Samples of one prompt: one computes the prompt, its siblings share the blocks and continue from there.

While one sample is about to compute the prompt, its siblings are blocked, outside of the queue. In the step after the
prompt is complete they are admitted with all of it cached: full blocks are shared, and the prompt's last, partial block
is copied, because each sibling writes its own tokens into it. Only the prompt's last token is computed again: each
sibling needs its logits for sampling.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.scheduler.core.prerequisites.port import Prerequisite, Requeue
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence


class Siblings(Prerequisite):
    """Sample groups of one core. A sequence joins this prerequisite last, right before the queue."""

    part = "sample_group"
    computes_prompt = True

    def __init__(self, requeue: Requeue) -> None:
        super().__init__()
        self._requeue = requeue
        self._computing: dict[SampleGroup, Sequence] = {}  # the sibling that computes the prompt, or is queued for it
        self._donors: dict[SampleGroup, dict[int, None]] = {}  # slots whose prompt is computed by earlier plans

    @property
    def num_computing(self) -> int:
        """Number of groups whose prompt is not computed yet."""
        return len(self._computing)

    def join(self, sequence: Sequence) -> bool:
        """Blocks a sample without output while another one of its group computes the prompt; returns whether it may
        run. The first sample of a group computes the prompt, and so does every sample that asks for prompt
        log-probabilities."""
        sample_group = sequence.sample_group
        if sample_group is None or not sequence.has_prompt_only:
            return True
        if self._computing.setdefault(sample_group, sequence) is sequence or sequence.asks_prompt_logprobs:
            return True
        self._blocked.add(sample_group, sequence)
        return False

    def leave(self, sequence: Sequence) -> None:
        """Removes `sequence`. If it was to compute the prompt, the next of its siblings does that."""
        sample_group = sequence.sample_group
        if sample_group is None:
            return
        self._blocked.remove(sequence)
        if self._computing.get(sample_group) is not sequence:
            return
        del self._computing[sample_group]
        blocked = self._blocked.on(sample_group)
        if blocked:
            successor = self._computing[sample_group] = blocked[0]
            self._blocked.remove(successor)
            self._requeue.restart(successor)

    def release_slot(self, sequence: Sequence) -> None:
        """Removes the slot of `sequence` from the donors of its group: its blocks can no longer be shared by slot."""
        donors = None if sequence.sample_group is None else self._donors.get(sequence.sample_group)
        if donors is not None and sequence.sample_group is not None:
            donors.pop(sequence.slot, None)
            if not donors:
                del self._donors[sequence.sample_group]

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        """Records the slots of `sequences` as donors of their groups' prompts; returns the siblings that were
        blocked until then."""
        freed: list[Sequence] = []
        for sequence in sequences:
            sample_group = sequence.sample_group
            if sample_group is not None:
                self._donors.setdefault(sample_group, {})[sequence.slot] = None
                if self._computing.get(sample_group) is sequence:
                    del self._computing[sample_group]
                    freed += self._blocked.free(sample_group)
        return freed

    def donor(self, sequence: Sequence) -> int | None:
        """Returns a slot whose prompt, the same as that of `sequence`, is computed. None if there is no such slot,
        if `sequence` has output, or if it asks for prompt log-probabilities."""
        if sequence.sample_group is None or not sequence.has_prompt_only or sequence.asks_prompt_logprobs:
            return None
        return next(iter(self._donors.get(sequence.sample_group, ())), None)
