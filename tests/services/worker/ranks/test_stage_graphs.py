"""Stages that record their steps say what one process says, with steps under way that are recorded and such that are
not. On the CPU: work repeated, not recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from shared.pb.common.v1 import sampling_pb2
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.test_decode_graphs import SAMPLINGS, plain_rig
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.recorded_stages import Pipeline, build_recorded, makers, record
from tests.services.worker.ranks.test_sharding import mixed_steps, ranked

Make = Callable[[str], Checkpoint]
ROOM = {"max_num_seqs": 12, "num_blocks": 400}
TELLS = sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=2)  # its prompts are in no recording


def said_alone(made: Checkpoint, sequences: list[tuple[New, list[int]]]) -> None:
    """What each sequence has said is what one process says of it."""
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


class Work:
    """Admissions, chunks, pauses, releases and preemptions at random, by micro-batch in turn."""

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
    pytest.param(2, (0, 1), False, "qwen3-tied", id="decodes"),
    pytest.param(2, (0, 1), True, "qwen3-tied", id="chunks"),
    pytest.param(3, (0, 1, 2), True, "llama", id="three stages"),
    pytest.param(3, (0, 1, 2), False, "gemma3-tied", id="three stages with windows"),
    pytest.param(2, (0,), True, "llama", id="the first alone"),
    pytest.param(2, (1,), False, "llama", id="the last alone"),
    pytest.param(2, (0, 1), True, "mixtral", id="experts"),
]


@pytest.mark.parametrize(("num_stages", "recorded", "chunks", "family"), WAYS)
def test_random_work_samples_the_same_tokens(
    checkpoint: Make, num_stages: int, recorded: tuple[int, ...], chunks: bool, family: str
) -> None:
    made = checkpoint(family)
    pipeline = Pipeline(made.folder, num_stages, recorded, cuda_graph_chunks=chunks, **ROOM)
    work = Work(pipeline, [*SAMPLINGS, TELLS], seed=7)
    work.run(150)
    assert work.num_preempted > 2
    for number in range(num_stages):
        assert (pipeline.num_recorded[number] > 30) == (number in recorded)
        assert pipeline.num_launched[number] > 5  # of sequences that ask for more than samples, at least
    said_alone(made, work.ended)
