"""Prerequisites are asked only about the sequences that they concern."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.scheduler.core.policies.fcfs import Fcfs
from quire.services.scheduler.core.policies.policy import DEFAULTS
from quire.services.scheduler.core.prerequisites.port import Prerequisite
from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.core.waiting import WaitingSequences
from tests.services.scheduler.conftest import make_sequence


class Recorder(Prerequisite):
    """Prerequisite that blocks every sequence that joins it, and records its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def join(self, sequence: Sequence) -> bool:
        self.calls.append(("join", sequence.key))
        self._blocked.add("it", sequence)
        return False

    def rejoin(self, sequence: Sequence) -> bool:
        self.calls.append(("rejoin", sequence.key))
        return True

    def leave(self, sequence: Sequence) -> None:
        self.calls.append(("leave", sequence.key))
        super().leave(sequence)

    def release_slot(self, sequence: Sequence) -> None:
        self.calls.append(("release_slot", sequence.key))

    def on_prompts_scheduled(self, sequences: Seq[Sequence]) -> list[Sequence]:
        self.calls += [("on_prompts_scheduled", sequence.key) for sequence in sequences]
        return []


class GrammarRecorder(Recorder):
    """Recorder for sequences under a grammar."""

    part = "grammar_id"


def life(queue: WaitingSequences, sequence: Sequence) -> None:
    """Takes a sequence through all operations of the queue."""
    queue.enqueue(sequence)
    if sequence.status is SequenceStatus.WAITING:
        queue.pop()
    queue.on_prompts_scheduled([sequence])
    queue.release_slot(sequence)
    queue.requeue(sequence)
    queue.remove(sequence)


def calls(recorder: Recorder, sequence: Sequence) -> list[str]:
    """Returns the calls of a recorder during the life of a sequence."""
    queue = WaitingSequences(Fcfs(DEFAULTS))
    queue.set_prerequisites([recorder])
    life(queue, sequence)
    assert queue.num_sequences == queue.num_tokens == 0
    return [call for call, _ in recorder.calls]


ALL = ["join", "on_prompts_scheduled", "release_slot", "rejoin", "leave"]


def test_a_prerequisite_of_a_part_sees_only_sequences_that_have_it() -> None:
    assert calls(GrammarRecorder(), make_sequence(1, [1, 2])) == []
    assert calls(GrammarRecorder(), make_sequence(1, [1, 2], grammar_id=b"g")) == ALL


def test_a_prerequisite_without_a_part_sees_every_sequence() -> None:
    assert calls(Recorder(), make_sequence(1, [1, 2])) == ALL


def test_of_several_prompts_only_those_concerned_are_reported() -> None:
    recorder = GrammarRecorder()
    queue = WaitingSequences(Fcfs(DEFAULTS))
    queue.set_prerequisites([recorder])
    queue.on_prompts_scheduled([make_sequence(1, [1]), make_sequence(2, [1], grammar_id=b"g"), make_sequence(3, [1])])
    assert recorder.calls == [("on_prompts_scheduled", 2)]
