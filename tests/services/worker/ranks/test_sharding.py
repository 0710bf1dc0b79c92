"""A sharded model returns the whole model's output: two processes on the CPU, over gloo."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.services.worker.building.rank_processes.start import build_part
from quire.services.worker.codec.step_codec import decode_plan, encode_result
from quire.services.worker.layers.sharding import Shard
from quire.services.worker.ranks import placement
from quire.services.worker.ranks.follower import RankReplica
from quire.services.worker.ranks.replica_ranks import ReplicaRanks
from quire.services.worker.replica.flight import StepInFlight
from quire.shared.errors import InvalidArgument
from quire.shared.pb.worker.v1 import worker_pb2 as pb
from tests.services.worker import checkpoints, recorded_logits
from tests.services.worker.checkpoints import FAMILIES, Checkpoint
from tests.services.worker.layers.quantization import layouts
from tests.services.worker.models.test_logits import MAX_ERROR, error, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
Flight = tuple[int, StepInFlight]  # and its ticket


@contextmanager
def ranked(
    folder: Path,
    size: int = 2,
    stages: int = 1,
    *,
    contexts: int = 1,
    record_logits: bool = True,
    build: Callable[..., RankReplica] = build_part,
    **settings: Any,
) -> Iterator[RankedRig]:
    """Runs a rig of ranks. `size`: ranks of each of the `stages` and `contexts`."""
    settings = {
        "tensor_parallel_size": size,
        "pipeline_parallel_size": stages,
        "context_parallel_size": contexts,
        **settings,
    }
    worker = Rig.settings(folder, **settings)
    make = functools.partial(recorded_logits.build, build) if record_logits else build
    group = ReplicaRanks(worker.num_ranks, functools.partial(make, worker), stages, contexts=contexts)
    rig = None
    try:
        rig = RankedRig(folder, group, record_logits=record_logits, **settings)
        group.wait_ready()
        yield rig
    finally:
        group.stop(10.0)
        if rig is not None:
            rig.forget()
        placement.leave()


class RankedRig(Rig):
    """A rig whose rank 0 is in this process."""

    def __init__(self, folder: Path, group: ReplicaRanks, *, record_logits: bool = True, **settings: Any) -> None:
        self.group = group
        super().__init__(folder, placement=group.placements[0], record_logits=record_logits, **settings)

    def forget(self) -> None:
        """Destroys CUDA graphs that contain collectives."""
        del self.replica
        gc.collect()

    def execute(self, plan: Any) -> Any:
        return self.finish(self.launch(plan))

    @torch.inference_mode()
    def execute_order(self, order: pb.DeviceOrder) -> None:
        """Executes an order on every rank while no step is in flight."""
        ticket = self.group.broadcast_order(order)
        self.replica.execute_order(order)
        assert not self.group.collect_order(ticket)

    @torch.inference_mode()
    def launch(self, plan: Any) -> Flight:
        return self.group.broadcast(decode_plan(plan)), self.replica.launch(decode_plan(plan))

    @torch.inference_mode()
    def finish(self, flight: Flight) -> Any:
        """Finishes the oldest launched step."""
        ticket, step = flight
        if not step.launch.heads_launched:
            self.group.settle_step()
            self.replica.launch_pending_heads()
        outcome = step.launch.wait()
        self.group.collect(ticket, step.inputs)
        self.replica.record(step, outcome)
        return encode_result(step.result(outcome, wait_us=0))


def mixed_steps(rig: Rig) -> None:
    """Steps with prompts, chunks and decodes."""
    rig.step([New(2, prompt(9, 2)), New(0, prompt(30, 1))], {0: 12, 2: 9})
    rig.step([New(5, prompt(17, 3))], {0: 12, 5: 17})
    rig.step(counts={0: 6, 2: 0})
    for _ in range(6):
        rig.step()


# A family for each way in which something is cut: fused and transposed inputs, heads that do not divide, norms of all
# heads, tied tables, biases, windows, shared experts, stacked ones, latent vectors.
DIFFERENT = frozenset(
    {
        *(
            "llama-biases-tied",
            "phi3-partial",
            "gemma2",
            "gemma3-tied",
            "cohere",
            "gpt2",
            "olmo2",
            "granite",
            "mixtral",
        ),
        *("deepseek-v2", "deepseek-v3", "gpt-oss", "granite-moe", "llama4", "qwen2-moe"),
    }
)


def thinned(family: str) -> Any:
    return pytest.param(family, marks=() if family in DIFFERENT else pytest.mark.sweep)


@pytest.mark.parametrize("family", [thinned(family) for family in FAMILIES])
def test_two_ranks_match_one(checkpoint: Make, family: str) -> None:
    made, whole = checkpoint(family), Rig(checkpoint(family).folder)
    mixed_steps(whole)
    with ranked(made.folder) as rig:
        mixed_steps(rig)
        for slot in (0, 2, 5):
            assert rig.tokens(slot) == whole.tokens(slot)
            assert error(rig, made, slot) < MAX_ERROR


def test_four_ranks_read_two_keys(tmp_path: Path) -> None:
    """Each key head is replicated on two ranks."""
    made = checkpoints.make("llama", tmp_path, num_attention_heads=8, num_key_value_heads=2)
    whole = Rig(made.folder)
    mixed_steps(whole)
    with ranked(made.folder, size=4) as rig:
        mixed_steps(rig)
        assert [rig.tokens(slot) for slot in (0, 2, 5)] == [whole.tokens(slot) for slot in (0, 2, 5)]


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "size", "keys"),
    [
        (8, 8, 2, [(0, 1, 2, 3), (4, 5, 6, 7)]),
        (8, 2, 2, [(0,), (1,)]),
        (8, 2, 4, [(0,), (0,), (1,), (1,)]),
        (6, 3, 2, [(0, 0, 1), (1, 2, 2)]),
        (4, 1, 2, [(0,), (0,)]),
    ],
)
def test_ranks_have_the_keys_of_their_queries(
    num_q_heads: int, num_kv_heads: int, size: int, keys: list[tuple[int, ...]]
) -> None:
    parts = [Shard(rank, size).heads(num_q_heads, num_kv_heads) for rank in range(size)]
    assert [part.keys for part in parts] == keys
    assert [head for part in parts for head in part.queries] == list(range(num_q_heads))
    for part in parts:
        group = part.num_q // part.num_kv
        assert [part.keys[place // group] for place in range(part.num_q)] == [
            head // (num_q_heads // num_kv_heads) for head in part.queries
        ]
    assert sum(owned for part in parts for owned in part.owned) == num_kv_heads


def test_what_ranks_do_not_divide_is_refused_by_name() -> None:
    with pytest.raises(InvalidArgument, match="tensor_parallel_size: 4 ranks do not divide num_attention_heads, 6"):
        Shard(0, 4).heads(6, 2)
    with pytest.raises(InvalidArgument, match="tensor_parallel_size: 3 ranks do not divide intermediate_size, 88"):
        Shard(0, 3).part(88, "intermediate_size")


def test_a_table_that_ranks_do_not_divide_has_room_left_on_the_last() -> None:
    assert [Shard(rank, 4).rows(10) for rank in range(4)] == [range(3), range(3, 6), range(6, 9), range(9, 10)]
    assert [Shard(rank, 4).rows(5) for rank in range(4)] == [range(2), range(2, 4), range(4, 5), range(5, 5)]


QUANTIZED_SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("phi3-window", "gptq"), ("llama-biases-tied", "awq"), ("glm4", "ct-int8"), ("llama", "fp8-blocks")],
)
def test_ranks_of_quantized_checkpoints(family: str, layout: str, tmp_path: Path) -> None:
    sizes = QUANTIZED_SIZES if layout != "fp8-blocks" else {**QUANTIZED_SIZES, "num_attention_heads": 8}
    made = layouts.make(layouts.LAYOUTS[layout], tmp_path, family, **sizes, head_dim=32)
    with ranked(tmp_path) as rig:
        mixed_steps(rig)
        for slot in (0, 2, 5):
            tokens, rows = rig.tokens(slot), torch.stack(rig.logits[slot])
            assert float((rows - made.logits(tokens)[len(tokens) - len(rows) - 1 : -1]).abs().max()) < 1e-4


def test_groups_that_ranks_would_have_to_share_are_refused_by_name(tmp_path: Path) -> None:
    layouts.make(layouts.LAYOUTS["gptq-act-order"], tmp_path, "llama", **QUANTIZED_SIZES, head_dim=32)
    with (
        pytest.raises(InvalidArgument, match=r"tensor_parallel_size: .*_proj has quantization groups"),
        ranked(tmp_path),
    ):
        pass
