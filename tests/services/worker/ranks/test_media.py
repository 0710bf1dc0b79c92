"""Every rank of a replica encodes pictures; parallelism without a place for their rows serves text alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from quire.services.worker.building.vision import read_processor
from quire.shared.settings import WorkerSettings
from tests.services.worker.media.pictures import greedy, identifier_of, make_llava, picture, prompt_with
from tests.services.worker.ranks.ranked_pair import ranked_pair

NUM_TOKENS = 8


def test_two_ranks_answer_as_transformers_does(tmp_path: Path) -> None:
    model = make_llava(tmp_path, "llama")
    pictures = [picture(1), picture(2)]
    prompts = [(5, pictures[0], 3, pictures[1], 2), (9,), (pictures[1], 6)]
    with ranked_pair(tmp_path, block_size=4, max_num_batched_tokens=24) as pair:
        pair.pixels = {identifier_of(one): one for one in pictures}
        for parts in prompts:
            tokens, media = prompt_with(*parts)
            pair.ask(tokens, NUM_TOKENS, eos=(), media=media)
        pair.run()
        for parts, answer in zip(prompts, pair.answers, strict=True):
            seen = [part for part in parts if not isinstance(part, int)]
            assert answer.tokens == greedy(model, answer.prompt, seen, NUM_TOKENS)


@pytest.mark.parametrize("field", ["pipeline_parallel_size", "context_parallel_size"])
def test_stages_and_contexts_open_the_text_part_alone(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_llava(tmp_path)
    assert read_processor(WorkerSettings(model=str(tmp_path))) is not None
    with caplog.at_level(logging.INFO, "quire"):
        assert read_processor(WorkerSettings(model=str(tmp_path), **{field: 2})) is None
    assert "text alone is served" in caplog.text


def test_two_stages_answer_text_as_one(tmp_path: Path) -> None:
    make_llava(tmp_path, "llama")
    prompts = [[5, 3, 2], [9], [6, 7, 1, 2]]
    found = []
    for stages in (1, 2):
        with ranked_pair(tmp_path, size=1, stages=stages, block_size=4, max_num_batched_tokens=24) as pair:
            assert (pair.replica.media.capacity > 0) == (stages == 1)
            for tokens in prompts:
                pair.ask(tokens, NUM_TOKENS, eos=())
            pair.run()
            found.append([answer.tokens for answer in pair.answers])
    assert found[0] == found[1]
