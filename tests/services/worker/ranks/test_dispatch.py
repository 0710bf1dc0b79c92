"""Ranks that send rows to each other's experts return one rank's output, and send no row twice or in vain."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.services.worker.layers.feed_forward.dispatch import ExpertDispatch, needed_by, route_counts
from quire.services.worker.layers.feed_forward.expert_placement import NO_EXPERT, ExpertPlacement
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.errors import InvalidArgument
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error
from tests.services.worker.ranks import graph_sums_build
from tests.services.worker.ranks.test_expert_parallel import Make, loads, one_process
from tests.services.worker.ranks.test_pipeline import by_turns, prefill
from tests.services.worker.ranks.test_sharding import RankedRig, mixed_steps, ranked
from tests.services.worker.rig import Rig
from tests.services.worker.sampling.rank_threads import RankThreads

# The first ones differ in what is beside the experts, or in what they get (tests/sweeps.py).
MIXTURES = (
    *("qwen2-moe", "llama4", "gpt-oss", "deepseek-v3"),
    *("mixtral", "granite-moe", "deepseek-v2", "olmoe", "qwen3-moe-tied", "qwen3-moe-some-layers"),
    "llama4-dense-layers",
)
ALL_TO_ALL = {"expert_parallel": True, "all2all_backend": "alltoall"}
MOVING = {"enable_eplb": True, "eplb_step_interval": 1}


def says_the_same(rig: RankedRig, whole: Rig, made: Checkpoint) -> None:
    """Compares tokens, logits and every rank's counts."""
    mixed_steps(whole)
    mixed_steps(rig)
    for slot in (0, 2, 5):
        assert rig.tokens(slot) == whole.tokens(slot)
        assert error(rig, made, slot) < MAX_ERROR
    assert loads(rig) == loads(whole)


@pytest.mark.parametrize("family", MIXTURES)
def test_dispatching_ranks_match_one(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    with ranked(made.folder, **ALL_TO_ALL) as rig:
        says_the_same(rig, one_process(made), made)


@pytest.mark.parametrize("family", ["llama4", "qwen2-moe", "deepseek-v3", "mixtral"])
def test_steps_of_both_ways_take_turns(checkpoint: Make, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on GPUs, where small steps use all-reduces."""
    made = checkpoint(family)
    monkeypatch.setattr(ExpertDispatch, "is_supported", staticmethod(graph_sums_build.takes))
    with ranked(made.folder, build=graph_sums_build.build, **ALL_TO_ALL) as rig:
        says_the_same(rig, one_process(made), made)


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("family", "size", "copies", "sizes"),
    [
        pytest.param("granite-moe", 3, 0, {}, id="granite-moe-3"),
        pytest.param("qwen2-moe", 4, 4, EIGHT_HEADS, id="qwen2-moe-4-copies"),
        pytest.param("mixtral", 3, 3, {"num_local_experts": 6}, id="mixtral-3-copies"),
        pytest.param("gpt-oss", 4, 4, EIGHT_HEADS, id="gpt-oss-4-copies"),
    ],
)
def test_more_ranks_some_of_them_without_rows(
    tmp_path: Path, family: str, size: int, copies: int, sizes: dict[str, int]
) -> None:
    """Three sequences decode."""
    made = checkpoints.make(family, tmp_path, **sizes)
    eplb = {**MOVING, "num_redundant_experts": copies} if copies else {}
    with ranked(made.folder, size, **ALL_TO_ALL, **eplb) as rig:
        says_the_same(rig, one_process(made), made)
        assert not copies or rig.replica.experts.balance.num_moved > 0


@pytest.mark.parametrize(("family", "copies"), [("deepseek-v3", 4), ("mixtral", 0), ("llama4", 4), ("qwen2-moe", 4)])
def test_experts_that_move_at_every_step(checkpoint: Make, family: str, copies: int) -> None:
    made = checkpoint(family)
    with ranked(made.folder, **ALL_TO_ALL, **MOVING, num_redundant_experts=copies) as rig:
        says_the_same(rig, one_process(made), made)
        assert rig.replica.experts.balance.num_moved > 0


def test_context_parallel_groups_dispatch(checkpoint: Make) -> None:
    made, whole = checkpoint("qwen2-moe"), one_process(checkpoint("qwen2-moe"))
    mixed_steps(whole)
    with ranked(made.folder, contexts=2, **ALL_TO_ALL) as rig:
        mixed_steps(rig)
        assert [rig.tokens(slot) for slot in (0, 2, 5)] == [whole.tokens(slot) for slot in (0, 2, 5)]


@pytest.mark.slow
def test_stages_of_such_ranks(checkpoint: Make) -> None:
    made, whole = checkpoint("qwen2-moe"), one_process(checkpoint("qwen2-moe"))
    prefill(whole)
    for _ in range(6):
        whole.step()
    with ranked(made.folder, stages=2, **ALL_TO_ALL) as rig:
        prefill(rig)
        by_turns(rig, 12, 2)
        assert [rig.tokens(slot) for slot in (0, 2, 5)] == [whole.tokens(slot) for slot in (0, 2, 5)]


RANKED = {"placement": RankPlacement(0, 2), "tensor_parallel_size": 2}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "all2all_backend: alltoall: it requires expert_parallel"),
        ({"expert_parallel": True}, "expert_parallel: it requires more than one rank"),
        (
            {**RANKED, "expert_parallel": True, "lora": {"a": "/a"}},
            "all2all_backend: alltoall: LoRA adapters are not supported",
        ),
        (
            {**RANKED, "expert_parallel": True, "lora_folders": ("/a",)},
            "all2all_backend: alltoall: LoRA adapters are not supported",
        ),
        (
            {**RANKED, "expert_parallel": True, "batch_invariant": True},
            "all2all_backend: alltoall: batch_invariant is not supported",
        ),
    ],
)
def test_what_cannot_be_is_refused_by_name(checkpoint: Make, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Rig(checkpoint("mixtral").folder, all2all_backend="alltoall", **settings)


@pytest.mark.parametrize("value", ["naive", "deepep_low_latency", ""])
def test_other_values_are_refused_with_those_that_there_are(tmp_path: Path, value: str) -> None:
    with pytest.raises(ValueError, match=r"all2all_backend\n.*'allreduce' or 'alltoall'"):
        Rig.settings(tmp_path, all2all_backend=value)


NUM_EXPERTS, TOP_K = 12, 4


def experts_of(num_tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """Expert choices without repetition, some of one rank only, and weights."""
    random = np.random.default_rng(seed)
    ids = np.stack([random.permutation(NUM_EXPERTS)[:TOP_K] for _ in range(num_tokens)]).reshape(-1, TOP_K)
    ids[::3] = np.arange(TOP_K)  # all on the first rank, or on the first two
    return torch.from_numpy(ids.astype(np.int32)), torch.from_numpy(random.random(ids.shape, dtype=np.float32))


def placed(shard: Shard, held: np.ndarray | None) -> ExpertPlacement:
    spare = 0 if held is None else held.shape[1] - NUM_EXPERTS // shard.size
    places = ExpertPlacement(NUM_EXPERTS, Shard(shard.rank, shard.size, spare_experts=spare), torch.device("cpu"))
    if held is not None:
        places.assign(held)
    return places


def made_of(held: np.ndarray, rank: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Expert function that multiplies by the expert's number plus one."""

    def make(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
        factors = torch.from_numpy(held[rank] + 1.0).float()[places.long()]
        return rows.nan_to_num() * (factors * weights * (places != NO_EXPERT)).sum(1, keepdim=True)

    return make


COPIES = np.array([[0, 1, 2, 3, 8], [4, 5, 6, 7, 0], [8, 9, 10, 11, 0]])


@pytest.mark.parametrize("num_tokens", [1, 2, 7, 9, 40])
@pytest.mark.parametrize("held", [None, COPIES], ids=["each once", "copies"])
def test_a_row_goes_once_to_each_rank_that_has_an_expert_of_it(num_tokens: int, held: np.ndarray | None) -> None:
    size = 3
    ids, weights = experts_of(num_tokens, num_tokens)
    x = torch.arange(1.0, num_tokens + 1).unsqueeze(1).repeat(1, 5)
    meeting = RankThreads(size)

    def work(shard: Shard) -> tuple[Tensor, Tensor]:
        places = placed(shard, held)
        dispatch, have = ExpertDispatch(shard, places), places.placement
        own = [dispatch.own(part) for part in (x, ids, weights)]
        choices = dispatch.gather_choices(own[1], own[2], num_tokens)
        made = dispatch.run_experts(own[0], choices, places.places_of(choices.ids), made_of(have, shard.rank))
        return places.ranks_of(ids), dispatch.all_gather_rows(made, num_tokens)

    results = meeting.run(work)
    ranks = results[0][0]
    expected = x * ((ids + 1) * weights).sum(1, keepdim=True)
    for _, made in results:
        torch.testing.assert_close(made, expected)
    there, back = meeting.swapped
    room = -(-num_tokens // size)
    for owner in range(size):
        for rank in range(size):
            rows = range(owner * room, min((owner + 1) * room, num_tokens))
            wanted = [row for row in rows if rank in ranks[row].tolist()]
            assert [int(row[0]) - 1 for row in there[owner][rank]] == wanted
            assert len(back[rank][owner]) == len(wanted)
    if held is None and num_tokens > 1:
        assert not any(int(row[0]) % 3 == 1 for owner in there for rank in (1, 2) for row in owner[rank])


def test_rows_are_counted_once_for_a_rank() -> None:
    ranks = torch.tensor([[0, 0, 0], [1, 0, 1], [1, 1, 1], [1, 2, 0], [2, 2, 2]])
    assert route_counts(needed_by(ranks, 3)).tolist() == [[2, 1, 0], [1, 2, 1], [0, 0, 1]]


def test_an_owner_adds_up_in_the_order_of_ranks() -> None:
    """Bit-exact: for these numbers another order gives another sum."""
    size, parts = 3, torch.tensor([1e8, -1e8, 3.0])
    ids = torch.tensor([[8, 0, 4]] * 3, dtype=torch.int32)

    def work(shard: Shard) -> Tensor:
        places = placed(shard, None)
        dispatch = ExpertDispatch(shard, places)
        choices = dispatch.gather_choices(dispatch.own(ids), torch.ones(1, 3), 3)
        own = dispatch.own(torch.ones(3, 2))
        return dispatch.run_experts(own, choices, places.places_of(ids), lambda rows, *_: rows * parts[shard.rank])

    for made in RankThreads(size).run(work):
        assert made.tolist() == [[3.0, 3.0]]
    assert float(parts[1] + parts[2] + parts[0]) != float(parts[0] + parts[1] + parts[2])
