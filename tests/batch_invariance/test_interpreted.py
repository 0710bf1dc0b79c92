"""Runs the CUDA kernels in a whole model without a GPU: Triton's interpreter runs their programs sequentially."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.services.worker.attention.batch_invariant import BatchInvariantAttention
from quire.services.worker.building.checks import batch_invariance
from quire.services.worker.graphs.cuda_graph import EagerRecorder
from quire.services.worker.graphs.decode_graphs import DecodeGraphs
from quire.services.worker.graphs.recorded_steps import RecordedModel
from quire.services.worker.graphs.row_facts import RowWatch
from quire.services.worker.graphs.step_edges import TorchStepEdges
from quire.services.worker.sampling.choice import PlainChoice
from quire.shared.pb.common.v1 import sampling_pb2
from tests.kernels.triton import ordered_dot
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.tuned import tune
from tests.services.worker import checkpoints
from tests.services.worker.graphs.fake_device import Copying
from tests.services.worker.models.test_logits import prompt
from tests.services.worker.plans import New
from tests.services.worker.replica_internals import current_model_of, give_memory_of_its_own, runner_of
from tests.services.worker.rig import Rig

pytestmark = pytest.mark.skipif(ON_GPU, reason="there they are compiled: see test_same_bits")

PACKAGES = ("quire.kernels.triton.batch_invariant", "quire.kernels.triton", "quire.kernels.reference")
ASKED = sampling_pb2.SamplingParams(temperature=0.8, seed=3, logprobs=4)


class Interpreted(BatchInvariantAttention):
    """Backend that accepts a CPU as its device."""

    def reject_reason(self, spec: Any) -> str | None:
        from quire.kernels.triton.batch_invariant.attention import chunk_attention, decode_attention

        self._decode, self._chunk = decode_attention, chunk_attention
        return None


@pytest.fixture(params=["qwen3-tied", "qwen2-moe"])
def build(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], Rig]:
    ordered_dot.use(monkeypatch)
    monkeypatch.setattr("quire.kernels.triton.unavailable", lambda: None)
    monkeypatch.setattr("quire.kernels.triton.batch_invariant.unavailable", lambda: None)
    tune(monkeypatch, "sampling.filtered_sampling", block=256)
    tune(monkeypatch, "batch_invariant.log_softmax", block=256)
    tune(monkeypatch, "batch_invariant.attention", span=64)
    monkeypatch.setattr("quire.services.worker.attention.backends.load_backend", lambda name: Interpreted())
    monkeypatch.setitem(kernels.BATCH_INVARIANT, "cpu", PACKAGES)
    monkeypatch.setitem(batch_invariance.ROW_INDEPENDENT_OPS, "cpu", batch_invariance.ROW_INDEPENDENT_OPS["cuda"])
    folder = checkpoints.make(request.param, tmp_path, num_hidden_layers=2).folder
    return lambda: with_graphs(Rig(folder, batch_invariant=True, attention_backend="batch_invariant"))


def with_graphs(rig: Rig) -> Rig:
    """Configures steps as on a GPU: decode steps use static memory, and the last layer computes sampling rows only."""
    runner, limits, table = runner_of(rig.replica), rig.replica.limits, rig.replica.table
    give_memory_of_its_own(rig.replica)
    graphs = DecodeGraphs(
        RecordedModel(
            forward=lambda batch: current_model_of(rig.replica).logits(
                current_model_of(rig.replica).forward(batch, runner.caches)
            ),
            choice=PlainChoice(runner.sampler.vocabulary, limits.max_num_seqs, torch.device("cpu")),
            edges=TorchStepEdges(),
            max_seq_len=limits.max_model_len,
            rows_per_prefix_tile=0,
        ),
        runner.slot_memory,
        [1, 3, limits.max_num_seqs],
        watch=RowWatch(table.block_table, limits.block_size, 0),
        recorder=EagerRecorder(),
        staging=Copying(),
    )
    runner.use_graphs(graphs)
    return rig


@pytest.mark.slow
@torch.inference_mode()
def test_logits_are_bit_identical_in_steps_of_all_kinds(build: Callable[[], Rig]) -> None:
    tokens = prompt(70, 1)
    rig = build()
    assert set(runner_of(rig.replica).sampler.grammar_masks.ops.sources.values()) == set(PACKAGES)
    rig.step([New(0, tokens, sampling=ASKED)], {0: 70})
    results = [rig.last_result.logprobs]
    for _ in range(3):
        rig.step()
        results.append(rig.last_result.logprobs)
    alone, said = torch.stack(rig.logits[0]), rig.tokens(0)

    rig.logits.clear()
    rig.step([New(0, tokens, sampling=ASKED), New(1, prompt(5, 2))], {0: 33, 1: 5}, released=[0])
    rig.step([New(4, prompt(66, 3))], {0: 36, 4: 66})
    rig.step(counts={0: 1})
    together = [rig.last_result.logprobs]
    for _ in range(3):
        rig.step()
        together.append(rig.last_result.logprobs)
    assert rig.tokens(0) == said
    assert torch.equal(torch.stack(rig.logits[0]), alone)
    assert together == results
