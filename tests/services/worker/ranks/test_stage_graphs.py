"""Stages with recorded steps return one process's output, with recorded and eager steps in flight. On the CPU
recordings are re-executed."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.test_decode_graphs import SAMPLINGS, plain_rig
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import GREEDY, New
from tests.services.worker.ranks.recorded_stages import Pipeline, build_recorded, makers, record
from tests.services.worker.ranks.test_sharding import Flight, RankedRig, ranked
from tests.services.worker.replica_internals import chunk_graphs_of, decode_graphs_of, runner_of
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
ROOM = {"max_num_seqs": 12, "num_blocks": 400}
TELLS = sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=2)  # its prompts are in no recording


def said_alone(made: Checkpoint, sequences: list[tuple[New, list[int]]]) -> None:
    """Checks that one process generates the same output for each sequence."""
    whole = plain_rig(made, num_blocks=400)
    for new, tokens in sequences:
        count = new.num_prompt or len(new.tokens)
        alone = New(0, new.tokens[:count], sampling=new.sampling)
        released = list(whole.scheduler.rows)
        for slot in released:
            whole.scheduler.give_back(slot)
        whole.step([alone], {0: count}, released)
        while len(whole.tokens(0)) < len(tokens):
            whole.step()
        assert whole.tokens(0) == tokens


class CountedWork:
    """Random admissions, chunks, pauses, releases and preemptions, alternating between micro-batches."""

    def __init__(self, pipeline: Pipeline, samplings: list[sampling_pb2.SamplingParams], seed: int) -> None:
        self._pipeline, self._samplings, self._choose = pipeline, samplings, random.Random(seed)
        self._free = set(range(ROOM["max_num_seqs"]))
        self._live: dict[int, New] = {}
        self._left: dict[int, int] = {}  # tokens of prompts to be computed, by slot
        self.ended: list[tuple[New, list[int]]] = []
        self.num_preempted = 0

    def run(self, num_steps: int) -> None:
        stages = self._pipeline.scheduler.num_stages
        for step in range(num_steps):
            self._step(step % stages, most_under_way=self._choose.randrange(1, stages + 2))
        self._pipeline.finish()
        for slot in list(self._live):
            self._end(slot)

    def _step(self, micro_batch: int, most_under_way: int) -> None:
        choose, scheduler = self._choose, self._pipeline.scheduler
        released, new = [], []
        done = [slot for slot in self._live if slot not in self._left]
        if done and choose.random() < 0.15:
            self._pipeline.finish()  # its tokens are known
            slot = choose.choice(done)
            released.append(slot)
            tokens, before = self._end(slot), self.ended[-1][0]
            if choose.random() < 0.5:
                self.ended.pop()
                self.num_preempted += 1
                new.append(New(slot, tokens, num_prompt=before.num_prompt or len(before.tokens), **_asks(before)))
        if self._free - set(released) and choose.random() < 0.4:
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 30))]
            slot = choose.choice(sorted(self._free - set(released) - {one.slot for one in new}))
            new.append(New(slot, tokens, sampling=choose.choice(self._samplings)))
        for one in new:
            self._free.discard(one.slot)
            self._live[one.slot], self._left[one.slot] = one, len(one.tokens)
        counts = self._counts(micro_batch)
        new.sort(key=lambda one: one.slot)
        self._pipeline.launch(scheduler.plan(new, counts, released, micro_batch), most_under_way)

    def _counts(self, micro_batch: int) -> dict[int, int]:
        stages, choose = self._pipeline.scheduler.num_stages, self._choose
        counts = {}
        for slot in self._live:
            if slot % stages != micro_batch:
                counts |= {slot: 0} if slot in self._left else {}
            elif slot in self._left:
                counts[slot] = min(self._left[slot], choose.randrange(1, 19))
                self._left[slot] -= counts[slot]
            elif choose.random() < 0.05:
                counts[slot] = 0
        self._left = {slot: left for slot, left in self._left.items() if left}
        return counts

    def _end(self, slot: int) -> list[int]:
        tokens = list(self._pipeline.scheduler.rows[slot].tokens)
        self._pipeline.scheduler.give_back(slot)
        self.ended.append((self._live.pop(slot), tokens))
        self._left.pop(slot, None)
        self._free.add(slot)
        return tokens


def _asks(new: New) -> dict[str, Any]:
    return {"sampling": new.sampling}


WAYS = [
    pytest.param(2, (0, 1), False, "qwen3-tied", id="decodes", marks=pytest.mark.slow),
    pytest.param(2, (0, 1), True, "qwen3-tied", id="chunks"),
    pytest.param(3, (0, 1, 2), True, "llama", id="three stages", marks=pytest.mark.slow),
    pytest.param(3, (0, 1, 2), False, "gemma3-tied", id="three stages with windows", marks=pytest.mark.slow),
    pytest.param(2, (0,), True, "llama", id="the first alone"),
    pytest.param(2, (1,), False, "llama", id="the last alone"),
    pytest.param(2, (0, 1), True, "mixtral", id="experts", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("num_stages", "recorded", "chunks", "family"), WAYS)
def test_random_work_samples_the_same_tokens(
    checkpoint: Make, num_stages: int, recorded: tuple[int, ...], chunks: bool, family: str
) -> None:
    made = checkpoint(family)
    pipeline = Pipeline(made.folder, num_stages, recorded, cuda_graph_chunks=chunks, **ROOM)
    work = CountedWork(pipeline, [*SAMPLINGS, TELLS], seed=7)
    work.run(100)
    assert work.num_preempted > 1
    for number in range(num_stages):
        assert (pipeline.num_recorded[number] > 30) == (number in recorded)
        assert pipeline.num_launched[number] > 5  # of sequences that ask for more than samples, at least
    said_alone(made, work.ended)


def test_rows_that_sample_nothing_send_nothing_back(checkpoint: Make) -> None:
    """Single prompt tokens in a step, with a decoding row and alone, use decode graphs."""
    made = checkpoint("llama")
    pipeline = Pipeline(made.folder, 2, (0, 1), cuda_graph_chunks=False, **ROOM)
    plan = pipeline.scheduler.plan
    new = [New(0, prompt(9, 2)), New(2, prompt(5, 1), sampling=SAMPLINGS[1])]
    pipeline.launch(plan(new, {0: 4, 2: 5}), most_under_way=2)
    for counts in ({0: 1}, {0: 1, 2: 0}, {0: 1}, {0: 2, 2: 0}, {}, {}):
        pipeline.launch(plan(counts=counts), most_under_way=2)
    pipeline.finish()
    assert (pipeline.num_recorded, pipeline.num_launched) == ([5, 5], [2, 2])
    assert [len(pipeline.scheduler.rows[slot].tokens) for slot in (0, 2)] == [12, 10]
    said_alone(made, [(one, pipeline.scheduler.rows[one.slot].tokens) for one in new])


@pytest.mark.parametrize("chunks", [False, True])
def test_padding_is_zeroed(checkpoint: Make, chunks: bool) -> None:
    """Padding is stored into the null block and must be finite."""
    pipeline = Pipeline(checkpoint("llama").folder, 2, (0, 1), cuda_graph_chunks=chunks, **ROOM)
    runner: Any = runner_of(pipeline.rigs[1].replica)
    graphs = chunk_graphs_of(pipeline.rigs[1].replica) if chunks else decode_graphs_of(pipeline.rigs[1].replica)
    with torch.inference_mode():
        graphs._model.stage.input_rows.fill_(torch.nan)
    new = [New(slot, prompt(5, slot)) for slot in (0, 2, 4)]
    counts = dict.fromkeys((0, 2, 4), 5)
    for _ in range(3):
        pipeline.launch(pipeline.scheduler.plan(new, counts), most_under_way=0)
        assert all(part.isfinite().all() for cache in runner.caches for part in (cache.k, cache.v))
        new, counts = [], {}
    assert pipeline.num_recorded[1] == 2 + chunks


def test_each_micro_batch_keeps_what_is_known_of_its_rows(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alternating micro-batches do not invalidate each other, and a new sequence invalidates both."""
    pipeline = Pipeline(checkpoint("llama").folder, 2, (0, 1), cuda_graph_chunks=False, **ROOM)
    looks = [0, 0]
    for number, rig in enumerate(pipeline.rigs):
        watch: Any = decode_graphs_of(rig.replica)._watch

        def shared(*_: Any, number: int = number) -> None:
            looks[number] += 1

        monkeypatch.setattr(watch, "_shared", shared)

    def decode(num_steps: int) -> None:
        for step in range(num_steps):
            pipeline.launch(pipeline.scheduler.plan(micro_batch=step % 2), most_under_way=2)
        pipeline.finish()

    for slot in range(4):
        new = [New(slot, prompt(5, slot))]
        pipeline.launch(pipeline.scheduler.plan(new, {slot: 5}, micro_batch=slot % 2), most_under_way=2)
    decode(10)
    assert looks == [2, 2]
    pipeline.launch(pipeline.scheduler.plan([New(4, prompt(5, 4))], {4: 5}), most_under_way=2)
    decode(10)
    assert looks == [4, 4]


Execute = Callable[[pb.StepPlan], None]
NUM_SLOTS, CHUNK = 6, 20


def by_turns(rig: Rig, execute: Execute) -> list[list[int]]:
    """Sequences of two micro-batches start one after the other, some in two chunks, while others decode; the last ones
    need features without recordings. Returns their output. A rig without stages computes the same steps."""
    scheduler = rig.scheduler
    samplings = [GREEDY, GREEDY, SAMPLINGS[1], SAMPLINGS[1], SAMPLINGS[2], SAMPLINGS[3]]
    for turn in range(14):
        for number in (0, 1):
            slot, length = 2 * (turn // 2) + number, 5 + 7 * (2 * (turn // 2) + number)
            new: list[New] = []
            counts = {} if scheduler.num_stages > 1 else {slot: 0 for slot in scheduler.rows if slot % 2 != number}
            if slot < NUM_SLOTS and turn % 2 == 0:
                new, counts[slot] = [New(slot, prompt(length, slot), sampling=samplings[slot])], min(length, CHUNK)
            elif slot < NUM_SLOTS and length > CHUNK:
                counts[slot] = length - CHUNK
            execute(scheduler.plan(new, counts, micro_batch=number if scheduler.num_stages > 1 else 0))
    return [rig.tokens(slot) for slot in range(NUM_SLOTS)]


def said_by_one(rig: Rig) -> list[list[int]]:
    return by_turns(rig, lambda plan: rig.scheduler.take(rig.execute(plan)) and None)


def said_by_stages(rig: RankedRig, most_under_way: int) -> list[list[int]]:
    """Output with at most `most_under_way` steps in flight after each launch."""
    flights: deque[Flight] = deque()

    def finish(most: int) -> None:
        while len(flights) > most:
            rig.scheduler.take(rig.finish(flights.popleft()))

    def execute(plan: pb.StepPlan) -> None:
        flights.append(rig.launch(plan))
        finish(most_under_way)

    said = by_turns(rig, execute)
    finish(0)
    return said  # the rows' own lists: the last tokens are there by now


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [False, True])
def test_two_processes_match_one(checkpoint: Make, chunks: bool) -> None:
    made = checkpoint("gemma3-tied")
    expected = said_by_one(plain_rig(made))
    settings: dict[str, Any] = {"attention_backend": "reference", "cuda_graph_chunks": chunks}
    with makers() as found, ranked(made.folder, 1, 2, record_logits=False, build=build_recorded, **settings) as rig:
        with torch.inference_mode():
            record(rig.replica, *found)
        assert said_by_stages(rig, most_under_way=3) == expected
