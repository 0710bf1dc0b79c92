"""Windows and states on CUDA, with and without graphs: pytest -m gpu."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.scheduler.core.sequences.sequence import SampleGroup
from tests.kv_groups import models
from tests.kv_groups.models import greedy
from tests.kv_groups.test_windows import prompt
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import RECURRENT_FAMILIES
from tests.spec_decode.pair import Pair, build

pytestmark = pytest.mark.gpu

WAYS = {
    "eager": {"cuda_graphs": False},
    "graphs": {"cuda_graph_chunks": False},
    "chunks in graphs": {"attention_backend": "triton"},
}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", models.RANDOM)
def test_text_is_that_of_transformers(tmp_path: Path, name: str, way: dict[str, object]) -> None:
    """Covers chunked prompts, prefix hits, siblings that copy their last block, and decoding beyond the window."""
    made = models.make(name, tmp_path)
    sizes = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 300}
    run = Pair(build(None, made.folder, **sizes, **way))
    asked = [run.ask(prompt(length, length), max_tokens=40, eos=()) for length in (90, 5, 33)]
    family = SampleGroup()
    asked += [run.ask(prompt(40, 7), max_tokens=20, eos=(), family=family) for _ in range(3)]
    run.run()
    asked.append(run.ask(asked[0].prompt + asked[0].tokens, max_tokens=30, eos=()))
    run.run()
    assert [a.tokens for a in asked] == [greedy(made, a.prompt, len(a.tokens)) for a in asked]
    assert run.core.counts.cached_tokens >= 128


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_text_of_recurrent_layers_is_that_of_transformers(tmp_path: Path, family: str, way: dict[str, object]) -> None:
    """Covers mixed batches, prefix hits with saved states, siblings, and decoding across block boundaries."""
    made = checkpoints.make(family, tmp_path)
    sizes = {"device": "cuda", "block_size": 16, "max_num_batched_tokens": 64, "max_num_seqs": 8, "num_blocks": 300}
    run = Pair(build(None, made.folder, **sizes, **way))
    asked = [run.ask(prompt(length, length), max_tokens=40, eos=()) for length in (90, 5, 33)]
    siblings = SampleGroup()
    asked += [run.ask(prompt(40, 7), max_tokens=20, eos=(), family=siblings) for _ in range(3)]
    run.run()
    asked.append(run.ask(asked[0].prompt + asked[0].tokens, max_tokens=30, eos=()))
    run.run()
    assert [a.tokens for a in asked] == [greedy(made, a.prompt, len(a.tokens)) for a in asked]
    assert run.core.counts.cached_tokens >= 128 + 2 * 32
