"""Sequences without a slot: in the order of the policy, or blocked on the first prerequisite that is not ready."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.scheduler.core.policies import Policy
from quire.services.scheduler.core.prerequisites.port import BlockSource, Prerequisite
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus


class WaitingSequences:
    """Owns the waiting queue and the way through the prerequisites, whatever those are."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.prerequisites: Seq[Prerequisite] = ()  # in the order in which sequences join them
        self._first: Seq[Prerequisite] = ()  # of these, which sequences join before they are in the queue
        self.slot_observers: Seq[Prerequisite] = ()  # of these, which note that slots are released
        self.num_tokens = 0  # of sequences without a slot; one for each whose prompt another one computes

    def set_prerequisites(self, prerequisites: Seq[Prerequisite]) -> None:
        """Names what sequences wait for, in the order in which they join it."""
        self.prerequisites = prerequisites
        self._first = [each for each in prerequisites if not isinstance(each, BlockSource)]
        plain = Prerequisite.release_slot
        self.slot_observers = [each for each in prerequisites if type(each).release_slot is not plain]

    @property
    def num_sequences(self) -> int:
        """Sequences without a slot, whatever they wait for."""
        return len(self.policy) + sum(prerequisite.num_blocked for prerequisite in self.prerequisites)

    def blocked(self) -> list[Sequence]:
        return [sequence for prerequisite in self.prerequisites for sequence in prerequisite.blocked()]

    def enqueue(self, sequence: Sequence, after: Prerequisite | None = None) -> None:
        """Joins the prerequisites, or those after `after`, which is ready: queues `sequence`, or blocks it."""
        self._count(sequence, sequence.num_tokens)
        for prerequisite in self._first if after is None else self._first[self._first.index(after) + 1 :]:
            if not prerequisite.join(sequence):
                sequence.status = SequenceStatus.BLOCKED
                if prerequisite.computes_prompt:
                    self._count(sequence, 1)  # the last token of its prompt
                return
        sequence.status = SequenceStatus.WAITING
        self.policy.push(sequence)

    def unblock(self, sequences: Seq[Sequence]) -> None:
        """Queues sequences whose prerequisites are ready: they come next."""
        for sequence in reversed(sequences):
            sequence.status = SequenceStatus.WAITING
            self.policy.push_back(sequence)

    def requeue(self, sequence: Sequence) -> None:
        """Queues a sequence that was preempted: it comes next among its equals."""
        sequence.status = SequenceStatus.PREEMPTED
        self.policy.push_back(sequence)
        self._count(sequence, sequence.num_tokens)

    def restart(self, sequence: Sequence) -> None:
        self._count(sequence, sequence.num_tokens)
        sequence.status = SequenceStatus.WAITING
        self.policy.push(sequence)

    def block(self, sequence: Sequence) -> None:
        """Takes a sequence out of the queue that has joined a prerequisite which is not ready."""
        if sequence.status is not SequenceStatus.BLOCKED:
            self.policy.remove(sequence)
            sequence.status = SequenceStatus.BLOCKED

    def raise_priority(self, sequence: Sequence, priority: int) -> None:
        sequence.priority = priority
        if sequence.status is SequenceStatus.WAITING:
            self.policy.remove(sequence)
            self.policy.push(sequence)

    def pop(self) -> Sequence:
        """Takes the head of the queue."""
        sequence = self.policy.pop()
        self.num_tokens -= sequence.num_queued_tokens
        sequence.num_queued_tokens = 0
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Removes a sequence without a slot, which leaves all prerequisites."""
        if sequence.status is not SequenceStatus.BLOCKED:
            self.policy.remove(sequence)
        self._count(sequence, 0)
        self.leave_prerequisites(sequence)

    def undo_enqueue(self, sequence: Sequence) -> None:
        """Removes a sequence however far it came, if it came at all."""
        self._count(sequence, 0)
        if any(waiting is sequence for waiting in self.policy):
            self.policy.remove(sequence)
        self.leave_prerequisites(sequence)

    def release_prerequisites(self, sequence: Sequence) -> None:
        """Leaves all prerequisites of a sequence that ran: what it was blocked on before has come since."""
        for prerequisite in self._first:
            prerequisite.leave(sequence)

    def leave_prerequisites(self, sequence: Sequence) -> None:
        """Leaves all prerequisites of a sequence that has ended or goes elsewhere."""
        for prerequisite in self.prerequisites:
            prerequisite.leave(sequence)

    def _count(self, sequence: Sequence, num_tokens: int) -> None:
        """Counts so many tokens of `sequence`, in place of those that were counted before."""
        self.num_tokens += num_tokens - sequence.num_queued_tokens
        sequence.num_queued_tokens = num_tokens
