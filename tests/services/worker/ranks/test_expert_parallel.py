"""Expert-parallel ranks return one rank's output, wherever experts move meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quire.services.worker.layers.feed_forward.expert_placement import NO_EXPERT, TURNS, ExpertPlacement
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.ranks.expert_balance import balanced_placement, max_rank_load, placement_moves
from quire.services.worker.ranks.placement import RankPlacement
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import model_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.ranks.test_sharding import mixed_steps, ranked
from tests.services.worker.replica_internals import runner_of, whole_model_of
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]

# An expert of each kind of checkpoint: a tensor for each, one for all, biases, bytes, groups, a shared one.
MIXTURES = ("mixtral", "qwen3-moe-tied", "qwen2-moe", "granite-moe", "gpt-oss", "deepseek-v3", "llama4")


def one_process(made: Checkpoint) -> Rig:
    """A rig that launches kernel by kernel, as ranks do: the last layer then computes sampled tokens only, where a tape
    computes all."""
    rig = Rig(made.folder)
    runner = runner_of(rig.replica)
    runner.use_model(whole_model_of(rig.replica))
    return rig


@pytest.mark.parametrize("family", MIXTURES)
def test_expert_parallel_ranks_match_one(checkpoint: Make, family: str) -> None:
    made, whole = checkpoint(family), one_process(checkpoint(family))
    mixed_steps(whole)
    with ranked(made.folder, expert_parallel=True) as rig:
        assert [2 * count for count in experts_held(rig)] == experts_held(whole)
        mixed_steps(rig)
        for slot in (0, 2, 5):
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR
        assert loads(rig) == loads(whole), "every rank counts all of them"


def moving(family: str, copies: int, *marks: Any) -> Any:
    return pytest.param(family, copies, marks=marks, id=f"{family}-{copies}")


@pytest.mark.parametrize(
    ("family", "copies"),
    [
        moving("mixtral", 0),
        moving("gpt-oss", 4),
        moving("llama4", 4),
        *(moving(family, 4, pytest.mark.sweep) for family in MIXTURES if family not in ("gpt-oss", "llama4")),
    ],
)
def test_moving_experts_do_not_change_output(checkpoint: Make, family: str, copies: int) -> None:
    made, whole = checkpoint(family), one_process(checkpoint(family))
    mixed_steps(whole)
    eplb = {"enable_eplb": True, "eplb_step_interval": 1, "num_redundant_experts": copies}
    with ranked(made.folder, expert_parallel=True, **eplb) as rig:
        mixed_steps(rig)
        for slot in (0, 2, 5):
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR
        assert loads(rig) == loads(whole)
        assert rig.replica.experts.balance.num_moved > 0


def test_updated_weights_follow_moved_experts(checkpoint: Make) -> None:
    """Also after experts have moved."""
    made, whole = checkpoint("mixtral"), one_process(checkpoint("mixtral"))
    eplb = {"enable_eplb": True, "eplb_step_interval": 1, "num_redundant_experts": 4}
    with ranked(made.folder, expert_parallel=True, weights_folders=(str(made.folder),), **eplb) as rig:
        mixed_steps(rig)
        assert rig.replica.experts.balance.num_moved > 0
        wanted = model_pb2.WeightsIdentity(update=1, version="1", path=str(made.folder))
        rig.execute_order(pb.DeviceOrder(stage_weights=pb.StageWeights(weights=wanted)))
        rig.execute_order(pb.DeviceOrder(swap_weights=pb.SwapWeights(update=1)))
        for each in (rig, whole):
            each.step([New(1, prompt(30, 1))], {1: 30} | dict.fromkeys((0, 2, 5), 0) if each is rig else {1: 30})
        assert rig.tokens(1) == whole.tokens(1)
        assert error(rig, made, 1) < MAX_ERROR


def experts_held(rig: Rig) -> list[int]:
    """Experts of each rank, by layer."""
    layers = whole_model_of(rig.replica).sparse_layers
    return [len(layer.experts.here) for layer in layers]


def loads(rig: Rig) -> dict[int, list[int]]:
    return {layer: counts.tolist() for layer, counts in rig.replica.experts.read_load().items()}


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"expert_parallel": True}, "expert_parallel: it requires more than one rank"),
        (
            "llama",
            {"placement": RankPlacement(0, 2), "tensor_parallel_size": 2, "expert_parallel": True},
            "expert_parallel: the model has no experts",
        ),
        ("mixtral", {"enable_eplb": True}, "enable_eplb: it requires expert_parallel"),
        (
            "mixtral",
            {
                "placement": RankPlacement(0, 2),
                "tensor_parallel_size": 2,
                "expert_parallel": True,
                "num_redundant_experts": 2,
            },
            "num_redundant_experts: it requires enable_eplb, which places replicas by load",
        ),
        (
            "mixtral",
            {
                "placement": RankPlacement(0, 2),
                "tensor_parallel_size": 2,
                "expert_parallel": True,
                "enable_eplb": True,
                "num_redundant_experts": 3,
            },
            "num_redundant_experts: 3 is not divisible by the 2 ranks",
        ),
    ],
)
def test_indivisible_experts_are_refused(checkpoint: Make, family: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Rig(checkpoint(family).folder, **settings)


def test_experts_go_to_ranks_whole_or_in_part() -> None:
    assert Shard(1, 2).experts(6, 88) == (range(6), range(44, 88))
    assert Shard(1, 2, whole_experts=True).experts(6, 88) == (range(3, 6), range(88))
    with pytest.raises(InvalidArgument, match="2 ranks do not divide the experts, 5"):
        Shard(1, 2, whole_experts=True).experts(5, 88)


def held(*rows: list[int]) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def test_a_busy_expert_is_left_alone_by_the_others() -> None:
    load = np.array([90, 40, 30, 20])
    found = balanced_placement(load, held([0, 1], [2, 3]))
    assert max_rank_load(load, found) == 110
    assert sorted(found[0]) == [0, 3]
    assert found[0, 0] == 0, "it stays where it is"


def test_a_copy_takes_its_share() -> None:
    load = np.array([100, 10, 10, 10])
    found = balanced_placement(load, held([0, 1, NO_EXPERT], [2, 3, NO_EXPERT]))
    assert max_rank_load(load, found) < 75
    assert (found == 0).sum(axis=1).tolist() == [1, 1], "one on each rank"


def test_nothing_moves_for_little() -> None:
    before = held([0, 1], [2, 3])
    assert balanced_placement(np.array([26, 26, 25, 25]), before) is before
    assert balanced_placement(np.zeros(4, dtype=np.int64), before) is before


@pytest.mark.parametrize("spare", [0, 1, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_expert_has_a_place_and_no_rank_has_it_twice(ranks: int, spare: int) -> None:
    random = np.random.default_rng(ranks)
    own = 4
    now = np.full((ranks, own + spare), NO_EXPERT)
    now[:, :own] = np.arange(ranks * own).reshape(ranks, own)
    for _ in range(50):
        load = (random.pareto(1, ranks * own) * 100).astype(np.int64)
        then = balanced_placement(load, now)
        assert max_rank_load(load, then) <= max_rank_load(load, now)
        assert set(then[then != NO_EXPERT]) == set(range(ranks * own))
        for row in then:
            kept = row[row != NO_EXPERT].tolist()
            assert len(kept) == len(set(kept))
        memory = np.where(now == NO_EXPERT, -7, now)
        after = memory.copy()
        for move in placement_moves(now, then):
            after[move.rank, move.place] = memory[move.from_rank, move.from_place]
        assert (after[then != NO_EXPERT] == then[then != NO_EXPERT]).all()
        now = then


def test_neighbouring_tokens_go_to_copies_in_turns() -> None:
    ranks = [
        ExpertPlacement(4, Shard(rank, 2, whole_experts=True, spare_experts=1), torch.device("cpu")) for rank in (0, 1)
    ]
    for places in ranks:
        places.assign(held([0, 1, 2], [2, 3, NO_EXPERT]))
        assert places.placement.tolist() == [[0, 1, 2], [2, 3, NO_EXPERT]]
    ids = torch.tensor([[2, 0]] * TURNS, dtype=torch.int32)
    first, second = (places.places_of(ids) for places in ranks)
    assert first.dtype == torch.int32
    assert first[:, 1].tolist() == [0] * TURNS
    assert second[:, 1].tolist() == [NO_EXPERT] * TURNS
    assert first[:, 0].tolist() == [2, NO_EXPERT] * (TURNS // 2)
    assert second[:, 0].tolist() == [NO_EXPERT, 0] * (TURNS // 2)
