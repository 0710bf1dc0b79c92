"""KV of several ranks in host memory: each keeps its part of the same blocks, and the text is that of transformers."""

from __future__ import annotations

import os
import signal
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.building.build import build_replica
from quire.services.worker.ranks.group import RankFailure
from quire.shared.errors import InvalidArgument
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from quire.shared.settings import WorkerSettings
from tests.kv_groups.test_tiers import COUNT, check, generate_all
from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.ranks.ranked_pair import RankedPair, ranked_pair

SIZES = {"block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4, "kv_offloading_size": 0.002}
# Family -> blocks on a device that holds about two of the prompts, and their length
FAMILIES = {"llama": (40, 4), "gemma3-tied": (64, 4), "qwen3-next": (30, 16), "falcon-h1": (40, 8)}


def two_ranks(checkpoint: Checkpoint, num_blocks: int, block_size: int = 4) -> AbstractContextManager[RankedPair]:
    return ranked_pair(checkpoint.folder, **{**SIZES, "block_size": block_size, "num_blocks": num_blocks})


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_evicted_prompts_return_on_both_ranks(family: str, tmp_path: Path) -> None:
    checkpoint = checkpoints.make(family, tmp_path)
    with two_ranks(checkpoint, *FAMILIES[family]) as run:
        prompts = [prompt(50, seed) for seed in range(4)]
        answers = generate_all(run, prompts)
        answers += generate_all(run, prompts)
        assert run.core.counts.fetched_blocks > 0
        assert run.core.counts.cached_tokens >= 4 * 48
        waiting = [run.ask(tokens, max_tokens=COUNT, eos=()) for tokens in prompts]  # at once, and preempted
        run.preempt_often(40)
        run.run()
        assert run.core.counts.preemptions > 3
        check(checkpoint, [*answers, *waiting])
        run.replica.end_epoch()
        run.group.end_epoch()


@pytest.mark.slow
def test_a_rank_that_cannot_move_its_part_ends_the_group_before_a_result_leaves_it(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    with two_ranks(checkpoint, 40) as run, torch.inference_mode():
        generate_all(run, [prompt(50, 0)])
        run.group.move_blocks(pb.Transfer(transfer_id=9, to_host=True))  # of nothing: rank 1 refuses it
        with pytest.raises(RankFailure, match="rank 1 failed: PlanViolation"):
            generate_all(run, [prompt(20, 1)])


@pytest.mark.slow
def test_a_rank_that_dies_while_it_moves_is_found(tmp_path: Path) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    with two_ranks(checkpoint, 40) as run:
        generate_all(run, [prompt(50, 0)])
        os.kill(run.group.pids[0], signal.SIGKILL)
        with pytest.raises((RankFailure, RuntimeError)):  # a sum that waits for it may hear of it first
            generate_all(run, [prompt(50, 1)])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"kv_offloading_disk": "/tmp/kv", "kv_offloading_disk_size": 1.0},
            "kv_offloading_disk: '/tmp/kv': not supported with 2 ranks",
        ),
        ({"kv_offloading_region": "/dev/shm"}, "kv_offloading_region: '/dev/shm': not supported with 2 ranks"),
    ],
)
def test_persistent_tiers_are_refused_for_several_ranks_by_name(
    settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    checkpoint = checkpoints.make("llama", tmp_path)
    values = {**SIZES, "num_blocks": 40, "tensor_parallel_size": 2, "threads": 1, **settings}
    with pytest.raises(InvalidArgument, match=said):
        build_replica(WorkerSettings(model=str(checkpoint.folder), **values))
