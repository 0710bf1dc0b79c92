"""Models with other caches than full keys and values, in a cluster of real processes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from quire.bench.workload import shapes
from tests.kv_groups import models
from tests.services.worker.checkpoints import VOCAB_SIZE
from tests.services.worker.spec_decode import test_mtp


@pytest.mark.timeout(300)  # starts processes
def test_cluster_matches_transformers_and_finds_prefixes(tmp_path: Path) -> None:
    made = models.tiny(tmp_path / "tiny", window=24)
    prompt = Tokenizer.from_file(str(made.folder / "tokenizer.json")).encode("2 + 2 is " * 12).ids
    assert len(prompt) > 24
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    with LLM(model=str(made.folder), dtype="float32") as llm:
        (first,) = llm.generate([prompt], params)
        longer = [*prompt, *first.outputs[0].token_ids]
        (second,) = llm.generate([longer], params)
    assert list(first.outputs[0].token_ids) == models.greedy(made, prompt, 24)
    assert list(second.outputs[0].token_ids) == models.greedy(made, longer, 24)
    assert second.cached_tokens >= len(longer) - 17


@pytest.mark.slow
@pytest.mark.timeout(300)  # starts processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_cluster_plans_latent_vectors_and_drafts_with_the_models_own_layers(tmp_path: Path, ranks: int) -> None:
    made = test_mtp.forgetful(tmp_path, test_mtp.OF_TOKEN, test_mtp.OF_TOKEN)
    (tmp_path / "tokenizer.json").write_text(json.dumps(shapes.word_tokenizer(VOCAB_SIZE)))
    prompt = test_mtp.prompts()[0]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    speculation = json.dumps({"method": "deepseek_mtp", "num_speculative_tokens": 2})
    settings = {"dtype": "float32", "speculative_config": speculation, "tensor_parallel_size": ranks}
    with LLM(model=str(tmp_path), **settings) as llm:
        (first,) = llm.generate([prompt], params)
        longer = [*prompt, *first.outputs[0].token_ids]
        (second,) = llm.generate([longer], params)
    assert list(first.outputs[0].token_ids) == models.greedy(made, prompt, 24)
    assert list(second.outputs[0].token_ids) == models.greedy(made, longer, 24)
    assert second.cached_tokens >= len(longer) - 17
