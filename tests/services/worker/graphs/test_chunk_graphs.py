"""Steps with chunks from static memory equal steps from fresh tensors. On the CPU: run eagerly, not recorded."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from quire.services.worker.graphs.chunk_graphs import ChunkGraphs, ChunkShape, chunk_shapes
from quire.services.worker.graphs.cuda_graph import EagerRecorder, Recordable
from quire.services.worker.graphs.recorded_steps import KeptHidden, RecordedModel
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.layers.forward_batch import ForwardBatch
from quire.services.worker.limits.worker_limits import WorkerLimits
from quire.services.worker.replica.replica import Replica
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.step.slots import NO_BLOCKS, NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from quire.shared import columns
from quire.shared.pb.common.v1 import sampling_pb2
from tests.services.worker.checkpoints import VOCAB_SIZE, Checkpoint
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.graphs.test_decode_graphs import SAMPLINGS, plain_rig, run_both
from tests.services.worker.models.test_logits import MAX_ERROR, prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import chunk_graphs_of, give_memory_of_its_own, runner_of, whole_model_of
from tests.services.worker.rig import Rig
from tests.spec_decode.methods import METHODS, TREES
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

Make = Callable[[str], Checkpoint]
ALL = METHODS | TREES
SHAPES = [ChunkShape(4, 3), ChunkShape(4, 5), ChunkShape(8, 3), ChunkShape(8, 9), ChunkShape(16, 9)]


class LastForward:
    """Records the last batch passed to the model."""

    batch: ForwardBatch
    num_forwards = 0


class SlowToLaunch(EagerRecorder):
    """Recorder for which computing takes longer than launching above a number of tokens."""

    def __init__(self, seen: LastForward, most_tokens: int) -> None:
        self._seen, self._most_tokens = seen, most_tokens

    def is_launch_bound(self, work: Recordable) -> bool:
        work()
        return len(self._seen.batch.token_ids) <= self._most_tokens


def use_chunk_graphs(
    replica: Replica, shapes: list[ChunkShape], most_tokens: int = 0, *, features: bool = False, has_trees: bool = False
) -> LastForward:
    """Uses chunk graphs as on a GPU: separate memory, and a graph for every step that fits.

    `most_tokens`: limit above which graphs do not pay; `features`: hidden states may be requested; `has_trees`: drafts
    may be trees.
    """
    runner, limits, seen = runner_of(replica), replica.limits, LastForward()
    decoder = whole_model_of(replica)
    give_memory_of_its_own(replica)

    def forward(batch: ForwardBatch) -> torch.Tensor:
        seen.batch, seen.num_forwards = batch, seen.num_forwards + 1
        return decoder.forward(batch, runner.caches)

    memory = torch.full((shapes[-1].num_tokens, decoder.config.hidden_size), torch.nan)
    model = RecordedModel(
        forward=lambda batch: decoder.logits(forward(batch)),
        hidden=KeptHidden(forward, decoder.logits, memory) if features else None,
        choice=PlainChoice(runner.sampler.vocabulary, shapes[-1].num_rows, torch.device("cpu")),
        edges=TorchStepEdges(),
        max_seq_len=limits.max_model_len,
        rows_per_prefix_tile=0,
        has_trees=has_trees,
    )
    recorder = SlowToLaunch(seen, most_tokens) if most_tokens else EagerRecorder()
    graphs = ChunkGraphs(model, runner.slot_memory, shapes, recorder=recorder, staging=Copying())
    graphs.leave_out_compute_bound()
    graphs.capture()
    assert graphs.count == sum(shape.num_tokens <= most_tokens or not most_tokens for shape in shapes)
    runner.use_chunk_graphs(graphs)
    return seen


def chunk_rig(made: Checkpoint) -> tuple[Rig, LastForward]:
    rig = plain_rig(made, record_logits=False, num_blocks=400)
    return rig, use_chunk_graphs(rig.replica, SHAPES)


@pytest.mark.parametrize("samplings", [SAMPLINGS[:2], SAMPLINGS], ids=["plain", "all"])
@pytest.mark.parametrize("family", ["qwen3-tied", "qwen2-windows"])
@torch.inference_mode()
def test_random_work_samples_the_same_tokens(
    checkpoint: Make, family: str, samplings: list[sampling_pb2.SamplingParams]
) -> None:
    """Covers admissions, chunks of all sizes among decodes, pauses and releases; some steps fit no graph.

    Greedy choices are recorded in graphs as well.
    """
    made = checkpoint(family)
    rig, seen = chunk_rig(made)
    rigs = [rig, plain_rig(made, num_blocks=400)]
    choose = random.Random(6)
    free, pending, num_steps = set(range(8)), {}, 90
    for _ in range(num_steps):
        released = [slot for slot in rigs[1].scheduler.rows if choose.random() < 0.05 and slot not in pending]
        for each in rigs:
            for slot in released:
                each.scheduler.give_back(slot)
        free |= set(released)
        new = []
        if free and choose.random() < 0.4:
            slot = free.pop()
            tokens = [choose.randrange(VOCAB_SIZE) for _ in range(choose.randrange(1, 30))]
            new.append(New(slot, tokens, sampling=choose.choice(samplings)))
            pending[slot] = len(tokens)
        counts = {slot: min(left, choose.randrange(1, 19)) for slot, left in pending.items()}
        pending = {slot: left - counts[slot] for slot, left in pending.items() if left > counts[slot]}
        paused = [slot for slot in rigs[1].scheduler.rows if slot not in counts and slot not in released]
        counts |= dict.fromkeys([slot for slot in paused if choose.random() < 0.05], 0)
        run_both(rigs, new, counts, released)
    assert num_steps // 2 < seen.num_forwards < num_steps
    assert all(part.isfinite().all() for cache in runner_of(rig.replica).caches for part in (cache.k, cache.v))


@torch.inference_mode()
def test_padding_tokens_are_a_prompt_in_the_null_block(checkpoint: Make) -> None:
    rig, seen = chunk_rig(checkpoint("llama"))
    rig.step([New(0, prompt(5)), New(2, prompt(3, 1))], {0: 5, 2: 3})  # eight tokens: no padding
    attention = seen.batch.attention
    assert seen.batch.token_ids.tolist() == [*prompt(5), *prompt(3, 1)]
    assert attention.query_start.tolist() == [0, 5, 8, 8]
    assert attention.seq_lens.tolist() == [5, 3, 0]

    rig.step([New(1, prompt(9, 2))], {1: 4})
    batch, attention = seen.batch, seen.batch.attention
    assert attention.query_start.tolist() == [0, 1, 5, 6, 8, 8]
    assert attention.seq_lens.tolist() == [6, 4, 4, 2, 0]
    assert attention.max_query_len == len(batch.token_ids) == 8
    assert batch.token_ids.tolist() == [rig.tokens(0)[5], *prompt(9, 2)[:4], rig.tokens(2)[3], 0, 0]
    assert batch.slot_mapping[6:].tolist() == [0, 0]
    assert not attention.block_tables[3:].any()
    assert batch.logit_tokens.tolist() == [0, 5, 0, 0, 0]


@torch.inference_mode()
def test_cached_prompt_with_more_blocks_than_tokens(checkpoint: Make) -> None:
    """A larger graph has room for its blocks; with too many blocks or tokens, the step is launched without a graph."""
    made = checkpoint("llama")
    rig, seen = chunk_rig(made)
    rigs = [rig, plain_rig(made)]
    tokens = prompt(120, 3)
    run_both(rigs, [New(0, tokens)], {0: 120})
    assert seen.num_forwards == 0
    for slot, num_blocks, num_tokens in ((1, 6, 8), (2, 14, 16), (3, 29, None)):
        before = seen.num_forwards
        first, second = (
            each.step([New(slot, tokens[: 4 * num_blocks + 2], cached_blocks=each.blocks(0)[:num_blocks])], {slot: 2})
            for each in rigs
        )
        assert first == second
        assert seen.num_forwards == before + (num_tokens is not None)
        assert num_tokens in (None, len(seen.batch.token_ids))
        run_both(rigs)


@torch.inference_mode()
@pytest.mark.parametrize("most_tokens", [4, 8, 3])
def test_steps_longer_than_their_launch_time_are_not_recorded(checkpoint: Make, most_tokens: int) -> None:
    made = checkpoint("llama")
    rigs = [plain_rig(made, record_logits=False), plain_rig(made)]
    seen = use_chunk_graphs(rigs[0].replica, SHAPES, most_tokens)
    for slot, num_tokens in enumerate((3, 7, 13)):
        before = seen.num_forwards
        run_both(rigs, [New(slot, prompt(num_tokens, slot))], {slot: num_tokens, **dict.fromkeys(range(slot), 0)})
        assert seen.num_forwards == before + (num_tokens <= most_tokens // 4 * 4)


@torch.inference_mode()
def test_sampling_options_and_steps_without_samples(checkpoint: Make) -> None:
    made = checkpoint("llama")
    rig, seen = chunk_rig(made)
    rigs = [rig, plain_rig(made)]
    biased = sampling_pb2.SamplingParams(temperature=0.0, logit_bias={7: 50.0}, logprobs=2)
    run_both(rigs, [New(0, prompt(12), sampling=biased)], {0: 5})
    run_both(rigs, [], {0: 4})
    for _ in range(2):
        run_both(rigs, [], {0: 3} if len(rig.tokens(0)) == 12 else {})
    assert rigs[0].tokens(0)[12] == 7
    found, wanted = (columns.f32(each.last_result.logprobs.logprobs) for each in rigs)
    assert np.abs(found - wanted).max() < MAX_ERROR
    assert seen.num_forwards > 2


@torch.inference_mode()
def test_prompt_log_probabilities_run_without_graphs(checkpoint: Make) -> None:
    made = checkpoint("llama")
    rig, seen = chunk_rig(made)
    rigs = [rig, plain_rig(made)]
    run_both(
        rigs, [New(0, prompt(9), sampling=sampling_pb2.SamplingParams(temperature=0.0, prompt_logprobs=1))], {0: 9}
    )
    assert seen.num_forwards == 0
    assert rigs[0].last_result.prompt_logprobs == rigs[1].last_result.prompt_logprobs


@pytest.mark.parametrize("method", ALL)
@torch.inference_mode()
def test_drafts_are_verified_in_graphs(method: str) -> None:
    """Slots have several samples in a step, some of which are rejected; some methods read the model's features."""
    replicas = [build(ALL[method]), build(ALL[method]), build()]
    shapes = [ChunkShape(tokens, rows) for tokens in (16, 32, 64) for rows in (9, 33, 65)]
    features = method.startswith(("eagle", "medusa"))
    seen = use_chunk_graphs(replicas[0], shapes, features=features, has_trees=method in TREES)
    pairs = [Pair(replica) for replica in replicas]
    texts = []
    for pair in pairs:
        answers = [pair.ask(asked, 48, eos=(), temperature=0.7, seed=3) for asked in questions()[:4]]
        pair.run()
        texts.append([answer.tokens for answer in answers])
    assert texts[0] == texts[1] == texts[2]
    assert seen.num_forwards > 10
    recorded, launched = (pair.core.speculation.counts for pair in pairs[:2])
    assert recorded.draft_tokens == launched.draft_tokens
    assert recorded.accepted_tokens == launched.accepted_tokens > 10


def step(num_rows: int, num_tokens: int, num_samples: int) -> StepInputs:
    """Builds step inputs of these sizes; nothing else is read."""
    rows, tokens, samples = (np.zeros(count, np.int32) for count in (num_rows, num_tokens, num_samples))
    return StepInputs(
        slots=rows,
        token_ids=tokens,
        positions=tokens,
        slot_mapping=tokens,
        query_start=np.zeros(num_rows + 1, np.int32),
        seq_lens=rows,
        num_blocks=1,
        prev_sampled_tokens=tokens[:0],
        prev_sampled_slots=rows[:0],
        sampling_slots=samples,
        sampling_tokens=samples,
        sample_positions=samples,
        rows_changed=False,
    )


def shape_of(graphs: ChunkGraphs, inputs: StepInputs, num_new_blocks: int = 0) -> tuple[int, int] | None:
    ids = np.zeros(num_new_blocks, np.int32)
    found = graphs._shape_of(inputs, NewBlocks(ids, ids, ids))
    return None if found is None else (found.num_tokens, found.num_rows)


@torch.inference_mode()
def test_the_smallest_shape_is_taken(checkpoint: Make) -> None:
    rig, _ = chunk_rig(checkpoint("llama"))
    graphs = chunk_graphs_of(rig.replica)
    assert graphs is not None
    assert shape_of(graphs, step(1, 3, 1)) == (4, 3)
    assert shape_of(graphs, step(2, 4, 2)) == (4, 3)
    assert shape_of(graphs, step(3, 4, 3)) == (4, 5)
    assert shape_of(graphs, step(2, 5, 4)) == (8, 5)  # drafts: more samples than rows
    assert shape_of(graphs, step(2, 16, 2)) == (16, 3)
    assert shape_of(graphs, step(2, 17, 2)) is None
    assert shape_of(graphs, step(9, 10, 9)) is None
    assert shape_of(graphs, step(1, 3, 1), num_new_blocks=5) == (8, 3)
    assert shape_of(graphs, step(1, 3, 1), num_new_blocks=17) is None
    assert not graphs.accepts(step(0, 0, 0), NO_BLOCKS)


def test_recorded_shapes_are_dense_and_all_used() -> None:
    limits = WorkerLimits(block_size=64, max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=40960)
    shapes = chunk_shapes(limits, 1)
    assert shapes == sorted(set(shapes))
    assert (shapes[0], shapes[-1]) == (ChunkShape(16, 33), ChunkShape(3072, 513))
    assert len(shapes) == 56
    for tokens, rows, samples in ((1, 1, 1), (100, 64, 64), (300, 300, 300), (1024, 512, 512), (64, 16, 64)):
        entries = max(rows + 1, samples)
        assert any(shape.num_tokens >= tokens and shape.num_rows >= entries for shape in shapes)
    assert all(shape.num_rows != shape.num_tokens for shape in shapes)
    few = WorkerLimits(block_size=64, max_num_seqs=16, max_num_batched_tokens=512, max_model_len=300)
    assert {shape.num_rows for shape in chunk_shapes(few, 1)} == {33}
    assert {shape.num_rows for shape in chunk_shapes(few, 4)} == {33, 129}
    assert max(chunk_shapes(few, 1)).num_tokens == 256
    assert not chunk_shapes(WorkerLimits(4, 8, 64, max_model_len=15), 1)
