"""Draft trees with the Triton kernels: the same text and accepted drafts as without drafts and as on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import kernels
from quire.services.worker.attention import backends
from quire.services.worker.attention.port import AttentionSpec
from quire.services.worker.attention.triton import TritonAttention
from quire.services.worker.graphs.chunk_graphs import ChunkShape
from quire.services.worker.replica.replica import Replica
from tests.interpreter import ON_GPU
from tests.kernels.triton.tuned import tune
from tests.services.worker.graphs.test_chunk_graphs import use_chunk_graphs
from tests.spec_decode.methods import TREES
from tests.spec_decode.pair import Pair, build
from tests.spec_decode.questions import questions

pytestmark = pytest.mark.skipif(ON_GPU, reason="of the interpreter: tests/spec_decode/test_cuda_trees.py is for GPUs")


# Small: the interpreter also computes padding rows. Two trees in one step have 14 samples.
SHAPES = [ChunkShape(16, 5), ChunkShape(16, 15), ChunkShape(32, 15)]


class Interpreted(TritonAttention):
    """Triton attention on the CPU, kernel by kernel."""

    records_decodes = records_chunks = False
    num_masked = 0  # calls with a mask

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "find", lambda package: (package, None))
            reason = super().reject_reason(replace(spec, device="cuda"))
        chunk = self._chunk

        def counted(*given: Any) -> Tensor:
            Interpreted.num_masked += given[-2] is not None  # the mask is before the ends of pictures
            return chunk(*given)

        self._chunk = counted
        return reason


@pytest.fixture(autouse=True)
def _interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    load = backends.load_backend
    monkeypatch.setattr(backends, "load_backend", lambda name: Interpreted() if name == "triton" else load(name))
    monkeypatch.setattr(Interpreted, "num_masked", 0)
    tune(monkeypatch, "attention.decode_attention", enough_programs=16)
    torch.set_num_threads(1)


def generated_by(replica: Replica) -> tuple[list[list[int]], tuple[int, int, int]]:
    """Returns the texts, the number of drafts and the number of accepted ones."""
    pair = Pair(replica)
    answers = [pair.ask(prompt, 12, eos=()) for prompt in sorted(questions(), key=len)[:2]]
    pair.run()
    counts = pair.core.speculation.counts
    return [answer.tokens for answer in answers], (counts.drafts, counts.draft_tokens, counts.accepted_tokens)


@pytest.mark.parametrize(
    ("method", "in_graphs"),
    [*(pytest.param(name, False, marks=pytest.mark.slow) for name in TREES), ("eagle_tree", True)],
)
def test_the_same_text_and_the_same_drafts(method: str, in_graphs: bool) -> None:
    replica = build(TREES[method], attention_backend="triton")
    if in_graphs:
        with torch.inference_mode():
            use_chunk_graphs(replica, SHAPES, features=True, has_trees=True)
        Interpreted.num_masked = 0
    found, expected = generated_by(replica), generated_by(build(TREES[method]))
    assert found == expected
    assert found[0] == generated_by(build())[0]
    assert found[1][2] > 5
    assert Interpreted.num_masked > 10
