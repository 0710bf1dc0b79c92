"""Decode steps from static memory equal steps from fresh tensors. On the CPU: run eagerly, not recorded."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from quire.services.worker.attention import reference
from quire.services.worker.attention.port import AttentionMetadata
from quire.services.worker.graphs.cuda_graph import EagerRecorder
from quire.services.worker.graphs.decode_graphs import DecodeGraphs, graph_sizes
from quire.services.worker.graphs.recorded_steps import RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.sampling.choice import PlainChoice
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.observing import calls_of
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.plans import New, ids_of
from tests.services.worker.replica_internals import (
    current_model_of,
    give_memory_of_its_own,
    runner_of,
)
from tests.services.worker.rig import Rig

Make = Callable[[str], Checkpoint]
ROWS_PER_TILE = 2

SAMPLINGS = [
    sampling_pb2.SamplingParams(temperature=0.0),
    sampling_pb2.SamplingParams(temperature=0.9, seed=4),
    sampling_pb2.SamplingParams(temperature=1.1, seed=-3, top_k=20, top_p=0.9),
    sampling_pb2.SamplingParams(temperature=0.7, seed=1, frequency_penalty=0.4, logprobs=2),
]


class CheckedAttention(reference.ReferenceAttention):
    """Checks that blocks declared as shared are shared."""

    num_shared_calls = 0

    def attend(self, q: Any, k_cache: Any, v_cache: Any, metadata: AttentionMetadata, **options: Any) -> Any:
        shared = metadata.prefixes
        if shared is not None:
            self.num_shared_calls += 1
            covered = torch.zeros_like(shared.starts)
            for members, table, length in zip(shared.members, shared.tables, shared.lens, strict=True):
                rows = members[members >= 0] if length else members[:0]
                blocks = int(length) // k_cache.size(1)
                assert (metadata.block_tables[rows, :blocks] == metadata.block_tables[table, :blocks]).all()
                assert (metadata.seq_lens[rows] > length).all()
                covered[rows] = length
            assert torch.equal(covered, shared.starts)
        if metadata.order is not None:
            lens = metadata.seq_lens[metadata.order]
            assert sorted(metadata.order.tolist()) == list(range(len(lens)))
        return super().attend(q, k_cache, v_cache, metadata, **options)


def plain_rig(made: Checkpoint, **settings: Any) -> Rig:
    """Builds a rig with the attention that decode graphs use on the CPU."""
    return Rig(made.folder, attention_backend="reference", **settings)


def graph_rig(made: Checkpoint, *, shared: bool = False, **settings: Any) -> tuple[Rig, CheckedAttention]:
    attention = CheckedAttention()
    with mock.patch("quire.services.worker.building.environment.choose_attention", return_value=attention):
        rig = Rig(made.folder, record_logits=False, num_blocks=400, **settings)
    runner, limits, table = runner_of(rig.replica), rig.replica.limits, rig.replica.table
    give_memory_of_its_own(rig.replica)
    model = RecordedModel(
        forward=lambda batch: current_model_of(rig.replica).logits(
            current_model_of(rig.replica).forward(batch, runner.caches)
        ),
        choice=PlainChoice(runner.sampler.vocabulary, limits.max_num_seqs, torch.device("cpu")),
        edges=TorchStepEdges(),
        max_seq_len=limits.max_model_len,
        rows_per_prefix_tile=ROWS_PER_TILE if shared else 0,
    )
    graphs = DecodeGraphs(
        model,
        runner.slot_memory,
        [1, 2, 5, limits.max_num_seqs],
        watch=RowWatch(table.block_table, limits.block_size, model.rows_per_prefix_tile, least_saved=16),
        recorder=EagerRecorder(),
        staging=Copying(),
    )
    graphs.capture()
    runner.use_graphs(graphs)
    return rig, attention


def run_both(rigs: list[Rig], *step: Any) -> None:
    first, second = (rig.step(*step) for rig in rigs)
    assert first == second


@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2-windows", "mistral-window"])
@torch.inference_mode()
def test_random_work_samples_the_same_tokens(checkpoint: Make, family: str) -> None:
    """Covers admissions, chunks, cached prompts, pauses, releases, and reuse of slots and blocks."""
    made = checkpoint(family)
    rigs = [graph_rig(made)[0], plain_rig(made, num_blocks=400)]
    choose = random.Random(5)
    free, pending = set(range(8)), {}
    for _ in range(150):
        released = [slot for slot in rigs[1].scheduler.rows if choose.random() < 0.04 and slot not in pending]
        for rig in rigs:
            for slot in released:
                rig.scheduler.give_back(slot)
        free |= set(released)
        new = []
        if free and choose.random() < 0.3:
            slot = free.pop()
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 20))]
            new.append(New(slot, tokens, sampling=choose.choice(SAMPLINGS)))
            pending[slot] = len(tokens)
        counts = {slot: min(left, choose.randrange(1, 9)) for slot, left in pending.items()}
        pending = {slot: left - counts[slot] for slot, left in pending.items() if left > counts[slot]}
        paused = [slot for slot in rigs[1].scheduler.rows if slot not in counts and slot not in released]
        counts |= dict.fromkeys([slot for slot in paused if choose.random() < 0.05], 0)
        run_both(rigs, new, counts, released)


@torch.inference_mode()
def test_following_decode_steps_reuse_the_layout(checkpoint: Make) -> None:
    """One addition on the device updates the inputs until a row needs a new block; blocks here have four positions."""
    made = checkpoint("llama")
    rigs = [graph_rig(made)[0], plain_rig(made)]
    run_both(rigs, [New(0, [5, 6, 7, 8, 9]), New(2, [3, 4, 5, 6, 7])], {0: 5, 2: 5})
    counts = []
    for _ in range(12):
        with calls_of(DecodeGraphs._fill) as uploads:
            run_both(rigs)
        counts.append(len(uploads))
    assert counts == [1, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 1]
    assert rigs[0].tokens(2) == rigs[1].tokens(2)


def begin_with_room(rig: Rig, tokens: dict[int, list[int]], num_blocks: int) -> None:
    """Runs a first step that assigns more blocks per slot than its prompt needs, out of order, as with drafts."""
    new = [New(slot, prompt) for slot, prompt in tokens.items()]
    plan = rig.scheduler.plan(new, {slot: len(prompt) for slot, prompt in tokens.items()})
    for _ in range(num_blocks):
        for row in rig.scheduler.rows.values():
            row.blocks.append(rig.scheduler.take_block())
    blocks = {slot: [block for position in rig.blocks(slot) for block in ids_of(position)] for slot in tokens}
    plan.new_block_slots = columns.u32_bytes([slot for slot, ids in blocks.items() for _ in ids])
    plan.new_block_ids = columns.u32_bytes([block for ids in blocks.values() for block in ids])
    rig.scheduler.take(rig.execute(plan))


@pytest.mark.parametrize("family", ["llama", "qwen2-windows"])
@torch.inference_mode()
def test_blocks_allocated_in_earlier_steps_are_reached(checkpoint: Make, family: str) -> None:
    """With drafting, blocks are allocated early: a step without drafts reaches them without a plan that names them."""
    made = checkpoint(family)
    drafting = {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 2}'}
    graphs, calm = graph_rig(made, **drafting)[0], plain_rig(made, num_blocks=400, **drafting)
    for rig in (graphs, calm):
        begin_with_room(rig, {0: [5, 6, 7, 8, 9], 2: [3, 4, 5, 6, 7]}, num_blocks=3)
    for _ in range(11):
        run_both([graphs, calm])
    assert graphs.tokens(0) == calm.tokens(0)


@pytest.mark.parametrize("family", ["llama", "qwen2-windows"])
@torch.inference_mode()
def test_a_prompt_that_is_cached_whole_decodes_in_a_graph(checkpoint: Make, family: str) -> None:
    made = checkpoint(family)
    rigs = [graph_rig(made)[0], plain_rig(made, num_blocks=400)]
    tokens = [random.Random(1).randrange(VOCAB_SIZE) for _ in range(8)]
    run_both(rigs, [New(0, tokens)], {0: 8})
    for rig in rigs:
        rig.step([New(3, tokens, cached_blocks=rig.blocks(0)[:2], sampling=SAMPLINGS[1])])
    for _ in range(5):
        run_both(rigs)
    assert rigs[0].tokens(3) == rigs[1].tokens(3)


@torch.inference_mode()
def test_shared_prefixes_are_passed_to_attention(checkpoint: Make) -> None:
    made = checkpoint("llama")
    rig, attention = graph_rig(made, shared=True)
    calm = plain_rig(made)
    head = [random.Random(2).randrange(VOCAB_SIZE) for _ in range(16)]
    run_both([rig, calm], [New(0, [*head, 1])], {0: 17})
    later = {slot: [*head, 2 * slot, 3] for slot in range(1, 7)}
    for each in (rig, calm):
        new = [New(slot, tokens, cached_blocks=each.blocks(0)[:4]) for slot, tokens in later.items()]
        each.step(new, dict.fromkeys(later, 2))
    for _ in range(6):
        run_both([rig, calm])
    calls = attention.num_shared_calls
    assert calls > 0
    run_both([rig, calm], [], {}, [1, 2, 3, 4])  # three are left
    run_both([rig, calm])
    assert attention.num_shared_calls == calls


def test_recorded_sizes_are_dense_and_cover_all_slots() -> None:
    for most in (1, 2, 8, 9, 100, 512, 700):
        sizes = graph_sizes(most)
        assert sizes[0] == 1
        assert sizes[-1] == most
        assert sizes == sorted(set(sizes))
    assert len(graph_sizes(512)) == 49
