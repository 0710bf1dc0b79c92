"""Every rank of a replica encodes pictures; parallelism without a place for their rows serves text alone."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.services.worker.building.vision import read_processor
from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.settings import WorkerSettings
from tests.services.worker.media.pictures import (
    NUM_ROWS,
    fetched,
    greedy,
    identifier_of,
    make_llava,
    picture,
    prompt_with,
)
from tests.services.worker.ranks.ranked_pair import RankedPair, ranked_pair
from tests.spec_decode.pair import build

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


def test_ranks_share_the_pictures_of_a_call(tmp_path: Path) -> None:
    """Their rows are those of one rank, also after a call that fails on one of them."""
    make_llava(tmp_path, "llama")
    pictures = [picture(number) for number in range(5)]
    alone = build(None, tmp_path, block_size=4, num_blocks=50, max_num_batched_tokens=24)
    with torch.inference_mode():
        alone.media.encode([fetched(one) for one in pictures])
    with ranked_pair(tmp_path, block_size=4, max_num_batched_tokens=24) as pair:
        for batch in (pictures[:2], pictures[2:]):
            items = [fetched(one) for one in batch]
            assert encoded(pair, items) == (None,) * len(batch)
        for one in pictures:
            name = identifier_of(one)
            assert np.array_equal(pair.replica.media.read(name), alone.media.read(name))
        good, bad = fetched(picture(8)), fetched(picture(9), NUM_ROWS + 1)
        nothing, error = encoded(pair, [good, bad])
        assert nothing is None
        assert isinstance(error, InvalidArgument)
        assert "num_embeddings" in error.message
        for one in pictures[:2]:
            pair.release_item(identifier_of(one))
        assert encoded(pair, [fetched(picture(10)), fetched(picture(11))]) == (None, None)


def encoded(pair: RankedPair, items: list[FetchedItem]) -> tuple[QuireError | None, ...]:
    """Encodes items in one call on all ranks; returns the errors on rank 0."""
    pair.group.encode_media(items)
    with torch.inference_mode():
        batch = pair.replica.media.encode(items)
    batch.wait()
    return batch.errors


@pytest.mark.parametrize("field", ["pipeline_parallel_size", "context_parallel_size"])
def test_stages_and_contexts_open_the_text_part_alone(
    field: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_llava(tmp_path)
    assert read_processor(WorkerSettings(model=str(tmp_path))) is not None
    with caplog.at_level(logging.INFO, "quire"):
        assert read_processor(WorkerSettings(model=str(tmp_path), **{field: 2})) is None
    assert "media are refused" in caplog.text


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
