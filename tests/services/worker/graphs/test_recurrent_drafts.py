"""Recurrent models draft as on a GPU: steps with drafts, and those that update states afterwards, use no graph; all
others do. On the CPU: run eagerly, not recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from quire import kernels
from quire.kernels import reference, triton
from quire.services.worker.graphs.chunk_graphs import ChunkGraphs, ChunkShape
from quire.services.worker.graphs.cuda_graph import EagerRecorder
from quire.services.worker.graphs.decode_graphs import DecodeGraphs
from quire.services.worker.graphs.recorded_steps import ReadyStep, RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.replica.replica import Replica
from quire.services.worker.runner.profiling import run_largest_steps
from quire.services.worker.sampling.choice import PlainChoice
from quire.services.worker.step.slots import NewBlocks
from quire.services.worker.step.step_inputs import StepInputs
from tests.interpreter import ON_GPU
from tests.kv_groups.test_recurrent_drafts import DRAFTED, THREE, Knowing, check_drafts, recurrences
from tests.kv_groups.test_states import SIZES, check
from tests.kv_groups.test_windows import SMALL, prompt
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.replica_internals import give_memory_of_its_own, kept_of, propose, runner_of, whole_model_of
from tests.spec_decode.pair import Pair, build

Make = Callable[[str], Checkpoint]
SHAPES = [ChunkShape(8, 9), ChunkShape(24, 9)]
STATES = ("short_convolution", "gated_delta_rule", "gated_norm", "state_space_scan")
PLAIN = {**SMALL, **SIZES, "attention_backend": "reference"}


class GraphSteps:
    """Counts steps that used graphs."""

    def __init__(self) -> None:
        self.decodes: list[StepInputs] = []
        self.chunks: list[StepInputs] = []


class CountedDecodeGraphs(DecodeGraphs):
    seen: GraphSteps

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        self.seen.decodes.append(inputs)
        return super().prepare(inputs, new_blocks)


class CountedChunkGraphs(ChunkGraphs):
    seen: GraphSteps

    def prepare(self, inputs: StepInputs, new_blocks: NewBlocks) -> ReadyStep:
        self.seen.chunks.append(inputs)
        return super().prepare(inputs, new_blocks)


def use_graphs(replica: Replica) -> GraphSteps:
    """Uses graphs of both kinds with separate memory, as on a GPU."""
    runner, limits, table, seen = runner_of(replica), replica.limits, replica.table, GraphSteps()
    give_memory_of_its_own(replica)
    decoder = whole_model_of(replica)
    model = RecordedModel(
        forward=lambda batch: decoder.logits(decoder.forward(batch, runner.caches)),
        choice=PlainChoice(runner.sampler.vocabulary, limits.max_num_seqs, torch.device("cpu")),
        edges=TorchStepEdges(),
        max_seq_len=limits.max_model_len,
        rows_per_prefix_tile=0,
    )
    memory, watch = runner.slot_memory, RowWatch(table.block_table, limits.block_size, 0)
    decodes = CountedDecodeGraphs(
        model, memory, [1, 4, limits.max_num_seqs], watch=watch, recorder=EagerRecorder(), staging=Copying()
    )
    chunks = CountedChunkGraphs(model, memory, SHAPES, recorder=EagerRecorder(), staging=Copying())
    decodes.seen = chunks.seen = seen
    decodes.capture()
    chunks.capture()
    runner.use_graphs(decodes)
    runner.use_chunk_graphs(chunks)
    return seen


INTERPRETED = (
    pytest.mark.slow,
    pytest.mark.skipif(ON_GPU, reason="tests/kv_groups/test_drafts_cuda.py has this there"),
)


@pytest.fixture(params=[reference, pytest.param(triton, marks=INTERPRETED)], ids=["reference", "triton"])
def _kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Selects the kernels of recurrent layers; all others are the CPU's."""
    package, load = request.param, kernels.load

    def some_of_others(device: str, packages: tuple[str, ...] = ()) -> kernels.Ops:
        ops = load(device, packages)
        sources = ops.sources | dict.fromkeys(STATES, package.__name__)
        return replace(ops, sources=sources, **{name: getattr(package, name) for name in STATES})

    monkeypatch.setattr(kernels, "load", some_of_others)


def drafting_known_text(made: Checkpoint, prompts: list[list[int]], count: int) -> Pair:
    """Builds a worker whose drafts for these answers are mostly right."""
    plain = Pair(build(None, made.folder, **PLAIN))
    answers = [plain.ask(tokens, max_tokens=count, eos=()) for tokens in prompts]
    plain.run()
    run = Pair(build(THREE, made.folder, **PLAIN))
    texts = [answer.prompt + answer.tokens for answer in answers]
    propose(run.replica, Knowing(texts, SIZES["block_size"]))
    return run


@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize("family", DRAFTED)
@torch.inference_mode()
def test_all_steps_without_drafts_use_graphs(checkpoint: Make, family: str) -> None:
    """Chunked prompts share steps with drafts, and a sequence without drafts decodes alone."""
    made, prompts = checkpoint(family), [prompt(length, seed) for seed, length in enumerate((30, 3, 17))]
    run = drafting_known_text(made, prompts, 18)
    seen = use_graphs(run.replica)
    answers = [run.ask(tokens, max_tokens=18, eos=()) for tokens in prompts]
    alone = run.ask(prompt(5, 9), max_tokens=30, eos=())
    run.run()
    check(made, answers, 18)
    check(made, [alone], 30)
    check_drafts(run)
    assert all(inputs.lags is None and inputs.drafts is None for inputs in seen.decodes + seen.chunks)
    assert len(seen.decodes) > 5
    assert len(seen.chunks) > 2


@torch.inference_mode()
def test_largest_steps_allocate_the_memory_of_draft_states(checkpoint: Make) -> None:
    """These run before KV memory is measured; later steps allocate none."""
    made = checkpoint("falcon-h1")
    with recurrences() as layers:
        run = drafting_known_text(made, [prompt(9, 1)], 20)
    layers = layers[len(layers) // 2 :]  # of the drafting worker
    use_graphs(run.replica)
    assert layers
    assert not kept_of(layers)
    num_slots, most = run.replica.limits.max_num_seqs + 1, THREE["num_speculative_tokens"]
    run_largest_steps(runner_of(run.replica), run.replica.limits, most)
    taken = kept_of(layers)
    assert {len(part) for part in taken} == {num_slots * most}
    answer = run.ask(prompt(9, 1), max_tokens=20, eos=())
    run.run()
    check(made, [answer], 20)
    assert run.core.speculation.counts.accepted_tokens > 5
    assert all(a is b for a, b in zip(taken, kept_of(layers), strict=True))
