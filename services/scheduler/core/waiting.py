"""Sequences without a slot: queued in the order of the policy, or blocked on the first prerequisite that is not
ready."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.scheduler.core.policies import Policy
from quire.services.scheduler.core.prerequisites.port import BlockSource, Prerequisite
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus


class WaitingSequences:
    """Owns the waiting queue and takes sequences through the prerequisites."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.prerequisites: Seq[Prerequisite] = ()  # in the order in which sequences join them
        self._before_queue: Seq[Prerequisite] = ()  # those that sequences join before they are queued
        self._slot_observers: Seq[Prerequisite] = ()  # those that are notified of released slots
        self._prompt_observers: Seq[
            Prerequisite
        ] = ()  # those that are notified of scheduled prompts, last joined first
        self._rejoined: Seq[Prerequisite] = ()  # those that preempted sequences join again
        self.num_tokens = (
            0  # tokens of the sequences without a slot; 1 for each sequence whose prompt a sibling computes
        )

    def set_prerequisites(self, prerequisites: Seq[Prerequisite]) -> None:
        """Sets the prerequisites, in the order in which sequences join them."""
        self.prerequisites = prerequisites
        self._before_queue = [each for each in prerequisites if not isinstance(each, BlockSource)]
        plain = Prerequisite
        self._slot_observers = [each for each in prerequisites if type(each).release_slot is not plain.release_slot]
        observing = (
            each for each in prerequisites if type(each).on_prompts_scheduled is not plain.on_prompts_scheduled
        )
        self._prompt_observers = [*observing][::-1]
        self._rejoined = [each for each in prerequisites if type(each).rejoin is not plain.rejoin]

    @property
    def num_sequences(self) -> int:
        """Number of sequences without a slot, blocked ones included."""
        return len(self.policy) + sum(prerequisite.num_blocked for prerequisite in self.prerequisites)

    def blocked(self) -> list[Sequence]:
        return [sequence for prerequisite in self.prerequisites for sequence in prerequisite.blocked()]

    def enqueue(self, sequence: Sequence, after: Prerequisite | None = None) -> None:
        """Takes `sequence` through the prerequisites, or those after `after`, which is ready; queues or blocks it."""
        self._count(sequence, sequence.num_tokens)
        for prerequisite in (
            self._before_queue if after is None else self._before_queue[self._before_queue.index(after) + 1 :]
        ):
            if prerequisite.concerns(sequence) and not prerequisite.join(sequence):
                sequence.status = SequenceStatus.BLOCKED
                if prerequisite.computes_prompt:
                    self._count(sequence, 1)  # only the last token of its prompt is left to compute
                return
        sequence.status = SequenceStatus.WAITING
        self.policy.push(sequence)

    def unblock(self, sequences: Seq[Sequence]) -> None:
        """Moves sequences whose prerequisites are ready to the front of the waiting queue."""
        for sequence in reversed(sequences):
            sequence.status = SequenceStatus.WAITING
            self.policy.push_back(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queues a preempted sequence, ahead of sequences of equal rank, or blocks it on a prerequisite that it had
        left."""
        self._count(sequence, sequence.num_tokens)
        for prerequisite in self._rejoined:
            if prerequisite.concerns(sequence) and not prerequisite.rejoin(sequence):
                sequence.status = SequenceStatus.BLOCKED
                return
        sequence.status = SequenceStatus.PREEMPTED
        self.policy.push_back(sequence)

    def release_slot(self, sequence: Sequence) -> None:
        """Notifies the prerequisites that a sequence is about to lose its slot."""
        for prerequisite in self._slot_observers:
            if prerequisite.concerns(sequence):
                prerequisite.release_slot(sequence)

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> None:
        """Queues the sequences that waited for the prompts of `sequences`, which the step being planned completes."""
        for prerequisite in self._prompt_observers:
            concerned = [*filter(prerequisite.concerns, sequences)]
            freed = prerequisite.on_prompts_scheduled(concerned) if concerned else []
            if freed:
                self.unblock(freed)

    def restart(self, sequence: Sequence) -> None:
        """Queues a blocked sequence as a new one, with all of its tokens counted as waiting."""
        self._count(sequence, sequence.num_tokens)
        sequence.status = SequenceStatus.WAITING
        self.policy.push(sequence)

    def block(self, sequence: Sequence) -> None:
        """Takes a sequence that has joined an unready prerequisite out of the queue."""
        if sequence.status is not SequenceStatus.BLOCKED:
            self.policy.remove(sequence)
            sequence.status = SequenceStatus.BLOCKED

    def raise_priority(self, sequence: Sequence, priority: int) -> None:
        """Sets the priority of a sequence; a queued one moves to its new place, a running or blocked one only keeps
        the value."""
        sequence.priority = priority
        if sequence.status is SequenceStatus.WAITING:
            self.policy.remove(sequence)
            self.policy.push(sequence)

    def pop(self) -> Sequence:
        """Removes and returns the head of the queue, and no longer counts its tokens as waiting."""
        sequence = self.policy.pop()
        self.num_tokens -= sequence.num_queued_tokens
        sequence.num_queued_tokens = 0
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence without a slot from the queue and from all prerequisites."""
        if sequence.status is not SequenceStatus.BLOCKED:
            self.policy.remove(sequence)
        self._count(sequence, 0)
        self.leave_prerequisites(sequence)

    def undo_enqueue(self, sequence: Sequence) -> None:
        """Removes a sequence from the queue and all prerequisites, whatever part of enqueue() was executed; it need
        not be in any of them."""
        self._count(sequence, 0)
        if any(waiting is sequence for waiting in self.policy):
            self.policy.remove(sequence)
        self.leave_prerequisites(sequence)

    def release_prerequisites(self, sequence: Sequence) -> None:
        """Removes a sequence that ran from the prerequisites that it joined before it was queued."""
        for prerequisite in self._before_queue:
            if prerequisite.concerns(sequence):
                prerequisite.leave(sequence)

    def leave_prerequisites(self, sequence: Sequence) -> None:
        """Removes a sequence that has ended or moves elsewhere from all prerequisites."""
        for prerequisite in self.prerequisites:
            if prerequisite.concerns(sequence):
                prerequisite.leave(sequence)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts `num_tokens` waiting tokens for `sequence`, instead of those counted before."""
        self.num_tokens += num_tokens - sequence.num_queued_tokens
        sequence.num_queued_tokens = num_tokens
