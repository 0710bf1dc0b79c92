"""A replica of several ranks: all derive the same steps from the bytes of plans, and deviations are detected."""

from __future__ import annotations

import asyncio
import functools
import os
import random
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest
import torch

from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.engine.engine import Engine
from quire.services.worker.ranks.follower import EXIT_ORPHANED
from quire.services.worker.ranks.group import OneRank, RankFailure
from quire.services.worker.ranks.placement import SINGLE_RANK
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from quire.services.worker.ranks.wire import fingerprint
from quire.services.worker.step.result import StepResult
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.engine.test_engine import Inbox, NoObserver, no_grammars
from tests.services.worker.heads.test_pooling import ALL
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import GREEDY, New
from tests.services.worker.ranks.whole_model_build import build
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]


@pytest.fixture
def ranks(checkpoint: Make) -> Iterator[ReplicaRanks]:
    """The other ranks; rank 0 is the test."""
    group = ReplicaRanks(2, functools.partial(build, checkpoint("llama").folder))
    try:
        group.wait_ready()
        yield group
    finally:
        group.stop(10.0)


@torch.inference_mode()
def step(rig: Rig, group: ReplicaRanks, plan: pb.StepPlan) -> StepInputs:
    """Executes a step as the engine does."""
    ticket = group.broadcast(decode_plan(plan))
    flight = rig.replica.launch(decode_plan(plan))
    output = flight.launch.wait()
    group.collect(ticket, flight.inputs)
    rig.replica.record(flight, output)
    rig.scheduler.take(encode_result(flight.result(output, wait_us=0)))
    return flight.inputs


def random_plans(rig: Rig, choose: random.Random, num_steps: int) -> Iterator[pb.StepPlan]:
    """Random admissions, chunks, decodes, pooled prompts and releases."""
    free, pending = set(range(8)), dict[int, int]()
    for _ in range(num_steps):
        released = [slot for slot in rig.scheduler.rows if slot not in pending and choose.random() < 0.05]
        for slot in released:
            rig.scheduler.free[:0] = rig.scheduler.rows[slot].blocks[::-1]
        free |= set(released)
        new = []
        if free and choose.random() < 0.4:
            slot = free.pop()
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 20))]
            pooling = ALL[2] if choose.random() < 0.3 else None
            new.append(New(slot, tokens, sampling=GREEDY, pooling=pooling))
            pending[slot] = len(tokens)
        counts = {slot: min(left, choose.randrange(1, 9)) for slot, left in pending.items()}
        pending = {slot: left - counts[slot] for slot, left in pending.items() if left > counts[slot]}
        yield rig.scheduler.plan(new, counts, released)


def test_two_ranks_derive_the_same_steps_from_the_bytes_of_plans(checkpoint: Make, ranks: ReplicaRanks) -> None:
    rig = Rig(checkpoint("llama").folder)
    num_tokens = sum(step(rig, ranks, plan).num_tokens for plan in random_plans(rig, random.Random(3), 40))
    assert num_tokens > 100
    rig.end_epoch()
    ranks.end_epoch()
    ranks.reset_cache()
    plan = rig.scheduler.plan([New(5, prompt(7))], {5: 7})  # a new epoch begins with empty slots everywhere
    assert step(rig, ranks, plan).num_tokens == 7


@torch.inference_mode()
def test_a_rank_that_is_at_another_step_is_found(checkpoint: Make, ranks: ReplicaRanks) -> None:
    rig = Rig(checkpoint("llama").folder)
    step(rig, ranks, rig.scheduler.plan([New(0, prompt(7))], {0: 5}))
    plan = rig.scheduler.plan(counts={0: 2})
    other = pb.StepPlan.FromString(plan.SerializeToString())
    other.counted_slots = other.token_counts = b""  # it computes nothing
    ticket = ranks.broadcast(decode_plan(other))
    with pytest.raises(RankFailure, match="rank 1 derived a different step"):
        ranks.collect(ticket, rig.replica.launch(decode_plan(plan)).inputs)


@torch.inference_mode()
def test_plan_that_a_rank_cannot_execute_is_reported_with_its_reason(checkpoint: Make, ranks: ReplicaRanks) -> None:
    rig = Rig(checkpoint("llama").folder)
    step(rig, ranks, rig.scheduler.plan([New(0, prompt(7))], {0: 7}))
    plan = rig.scheduler.plan(released=[0])
    inputs = rig.replica.launch(decode_plan(plan)).inputs
    ranks.broadcast(decode_plan(plan))
    ticket = ranks.broadcast(decode_plan(plan))  # once more than rank 0: the slot is free already
    with pytest.raises(RankFailure, match=r"rank 1 failed: PlanViolation: released slots are not live"):
        ranks.collect(ticket, inputs)


def test_fingerprints_distinguish_steps(checkpoint: Make) -> None:
    rig = Rig(checkpoint("llama").folder)
    seen = set()
    with torch.inference_mode():
        for i in range(6):
            plan = rig.scheduler.plan(
                [New(0, prompt(7))] if not i else [], {0: 3} if not i else {0: 4} if i == 1 else {}
            )
            flight = rig.replica.launch(decode_plan(plan))
            rig.replica.record(flight, flight.launch.wait())
            seen.add(fingerprint(flight.inputs))
    assert len(seen) == 6


def await_failure(group: ReplicaRanks) -> RankFailure:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            group.check()
        except RankFailure as failure:
            return failure
        time.sleep(0.5)  # as often as a worker looks
    raise AssertionError("nobody noticed")


def test_a_rank_that_dies_is_noticed_by_itself_and_by_the_next_step(checkpoint: Make, ranks: ReplicaRanks) -> None:
    rig = Rig(checkpoint("llama").folder)
    ranks.check()
    process = ranks.local.ranks[0].process
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    assert "rank 1 has ended" in await_failure(ranks).message
    with pytest.raises(RankFailure, match="rank 1 has ended"):
        step(rig, ranks, rig.scheduler.plan([New(0, prompt(7))], {0: 7}))


def test_ranks_end_on_stop_and_with_rank_0(checkpoint: Make) -> None:
    group = ReplicaRanks(3, functools.partial(build, checkpoint("llama").folder))
    try:
        group.wait_ready()
        first, second = (rank.process for rank in group.local.ranks)
        group.local.ranks[0].replies.close()  # as when the process of rank 0 ends
        first.join(60)
        assert first.exitcode == EXIT_ORPHANED
        group.stop(60.0)
        assert second.exitcode == 0
        group.stop(1.0)
    finally:
        group.stop(5.0)


def test_rank_that_cannot_be_built_reports_the_reason(tmp_path: Path) -> None:
    group = ReplicaRanks(2, functools.partial(build, tmp_path))
    try:
        with pytest.raises(RankFailure, match=r"rank 1 failed: .*config.json"):
            group.wait_ready()
    finally:
        group.stop(5.0)


@pytest.fixture
async def engine(checkpoint: Make) -> AsyncIterator[Engine]:
    folder = checkpoint("llama").folder
    group = ReplicaRanks(2, functools.partial(build, folder))
    engine = Engine(
        lambda: build(folder, SINGLE_RANK).replica, NoObserver(), grammars=no_grammars(), synchronous=True, ranks=group
    )
    yield engine
    assert await engine.stop(60.0)
    assert not any(rank.process.is_alive() for rank in group.local.ranks)


class Results(Inbox):
    """A receiver that keeps whole results."""

    def __init__(self) -> None:
        super().__init__()
        self.whole: asyncio.Queue[StepResult] = asyncio.Queue()

    def deliver(self, result: StepResult) -> None:
        self.whole.put_nowait(result)


async def test_an_engine_of_two_ranks_answers_once_and_as_one_of_one(checkpoint: Make, engine: Engine) -> None:
    await engine.started
    inbox = Results()
    await engine.start_epoch(inbox)
    rig = Rig(checkpoint("llama").folder)
    for i in range(5):
        plan = rig.scheduler.plan([New(0, prompt(7))] if i == 0 else [], {0: 7} if i == 0 else {})
        expected = rig.execute(plan)
        engine.submit(inbox, decode_plan(plan))
        result = await asyncio.wait_for(inbox.whole.get(), 60)
        assert encode_result(result).token_ids == expected.token_ids
        assert result.step_id == expected.step_id


async def test_an_engine_ends_when_a_rank_dies(engine: Engine) -> None:
    await engine.started
    group = engine.ranks
    assert isinstance(group, ReplicaRanks)
    process = group.local.ranks[0].process
    assert process.pid
    os.kill(process.pid, signal.SIGKILL)
    process.join(60)
    engine.check_ranks()
    with pytest.raises(RankFailure, match="rank 1 has ended"):
        await asyncio.wait_for(engine.died, 60)


def test_a_group_of_one_starts_no_process_and_no_thread() -> None:
    before = threading.active_count()
    group = OneRank()
    group.wait_ready()
    group.end_epoch()
    group.check()
    group.stop(1.0)
    assert group.size == 1
    assert threading.active_count() == before
