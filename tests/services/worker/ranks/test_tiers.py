"""KV in host memory of several ranks: each keeps its part of the same blocks, and the text is that of transformers."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from services.scheduler.core.transfers.limits import TierLimits
from services.worker.building.build import build_replica
from services.worker.ranks import start
from services.worker.ranks.group import RankFailure
from services.worker.ranks.local import LocalRanks
from services.worker.ranks.seat import leave
from shared.errors import InvalidArgument
from shared.pb.worker.v1 import worker_pb2 as pb
from shared.settings import WorkerSettings
from tests.kv_groups.test_tiers import COUNT, check, say
from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.spec_decode.pair import Pair, build, settings_of

SIZES = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_offloading_size": 0.002}
# Family -> blocks on a device that holds about two of the prompts
FAMILIES = {"llama": 40, "gemma3-tied": 64}


class RankedPair(Pair):
    """Rank 0 is here."""

    def __init__(self, group: LocalRanks, *arguments: Any, **limits: Any) -> None:
        self._group = group
        super().__init__(*arguments, **limits)

    def execute(self, plan: pb.StepPlan) -> pb.StepResult:
        ticket = self._group.broadcast(plan)
        flight = self.replica.launch(plan)
        outcome = flight.launch.wait()
        self._group.collect(ticket, flight.inputs)
        self.replica.record(flight, outcome)
        return flight.result(outcome, wait_us=0)

    def move(self, order: pb.Transfer) -> None:
        moving = self.replica.move(order)
        self._group.move(order)
        moving.wait()
        self._group.moved(order.transfer_id)


@contextlib.contextmanager
def two_ranks(checkpoint: Checkpoint, num_blocks: int) -> Iterator[tuple[RankedPair, LocalRanks]]:
    values = {**SIZES, "num_blocks": num_blocks, "tensor_parallel_size": 2}
    group = LocalRanks(2, functools.partial(start.build_part, settings_of(None, checkpoint.folder, **values)))
    seat = group.seats[0]
    try:
        replica = build(None, checkpoint.folder, seat, **values)
        group.start()
        yield RankedPair(group, replica, tiers=TierLimits(replica.num_host_blocks)), group
    finally:
        group.stop(10.0)
        leave()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_that_the_device_has_lost_come_back_on_both_ranks(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoints.make(family, tmp_path)
    with two_ranks(checkpoint, FAMILIES[family]) as (run, group):
        prompts = [prompt(50, seed) for seed in range(4)]
        answers = say(run, prompts)
        answers += say(run, prompts)
        assert run.core.counts.fetched_blocks > 0
        assert run.core.counts.cached_tokens >= 4 * 48
        waiting = [run.ask(tokens, max_tokens=COUNT, eos=()) for tokens in prompts]  # at once, and preempted
        run.preempt_often(40)
        run.run()
        assert run.core.counts.preemptions > 3
        check(checkpoint, [*answers, *waiting])
        run.replica.rest()
        group.rest()


@pytest.mark.slow
def test_a_rank_that_cannot_move_its_part_ends_the_group_before_a_result_leaves_it(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    with two_ranks(checkpoint, 40) as (run, group), torch.inference_mode():
        say(run, [prompt(50, 0)])
        group.move(pb.Transfer(transfer_id=9, to_host=True))  # of nothing: rank 1 refuses it
        with pytest.raises(RankFailure, match="rank 1 failed: PlanViolation"):
            say(run, [prompt(20, 1)])


@pytest.mark.slow
def test_a_rank_that_dies_while_it_moves_is_found(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    with two_ranks(checkpoint, 40) as (run, group):
        say(run, [prompt(50, 0)])
        os.kill(group.pids[0], signal.SIGKILL)
        with pytest.raises((RankFailure, RuntimeError)):  # a sum that waits for it may hear of it first
            say(run, [prompt(50, 1)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"kv_offloading_disk": "/tmp/kv", "kv_offloading_disk_size": 1.0}, "kv_offloading_disk: '/tmp/kv': each of 2"),
        ({"kv_offloading_region": "/dev/shm"}, "kv_offloading_region: '/dev/shm': each of 2 ranks has a part"),
    ],
)
def test_what_outlives_a_worker_is_refused_to_ranks_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    values = {**SIZES, "num_blocks": 40, "tensor_parallel_size": 2, "threads": 1, **settings}
    with pytest.raises(InvalidArgument, match=said):
        build_replica(WorkerSettings(model=str(checkpoint.folder), **values))
