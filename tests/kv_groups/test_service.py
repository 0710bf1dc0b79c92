"""A model with windows in a cluster of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from quire import LLM, SamplingParams
from tests.kv_groups import models


@pytest.mark.timeout(300)  # starts processes
def test_a_cluster_says_what_transformers_say_and_finds_prefixes(tmp_path: Path) -> None:
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
