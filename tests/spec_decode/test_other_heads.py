"""Vectors and prompt log-probabilities equal those of prompts computed alone and whole: in chunks, after preemptions,
with cached prefixes, in shared steps, with drafts and without."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from quire.services.worker.replica.replica import Replica
from quire.shared.pb.common.v1 import pooling_pb2
from quire.shared.pb.common.v1.pooling_pb2 import PoolingParams
from tests.spec_decode.methods import METHODS
from tests.spec_decode.pair import Answer, Pair, build
from tests.spec_decode.questions import questions

MAX_ERROR = 1e-4  # for unit vectors; 20 times that for log-probabilities
POOLED = [
    PoolingParams(),
    PoolingParams(pooler=pooling_pb2.POOLER_MEAN),
    PoolingParams(pooler=pooling_pb2.POOLER_CLS),
    PoolingParams(pooler=pooling_pb2.POOLER_ALL, dimensions=8),
    PoolingParams(pooler=pooling_pb2.POOLER_STEP, step_tag_id=33, dimensions=8),
]
ASKED: list[dict[str, Any]] = [
    *({"pooling": params} for params in POOLED),
    {"prompt_logprobs": 2, "max_tokens": 3},
    {"prompt_logprobs": 0, "prompt_logprob_start": 9, "max_tokens": 3},
]


@pytest.fixture(scope="module", params=[None, "ngram", "eagle"])
def replica(request: pytest.FixtureRequest) -> Replica:
    torch.set_num_threads(1)
    return build(METHODS.get(request.param), num_blocks=600)


def texts() -> list[list[int]]:
    """Returns one text per kind of request; each contains the token that POOLER_STEP reads, early and late."""
    prompt = (questions()[0] * 3)[:150]
    return [[*prompt[i:40], 33, *prompt[40 + i :], 33, 40 + i] for i in range(len(ASKED))]


def ask_all(pair: Pair) -> list[Answer]:
    return [pair.ask(text, **asked) for text, asked in zip(texts(), ASKED, strict=True)]


@pytest.fixture(scope="module")
def alone() -> list[Answer]:
    replica = build(attention_backend="reference", num_blocks=600)
    found: list[Answer] = []
    for text, asked in zip(texts(), ASKED, strict=True):
        pair = Pair(replica, enable_prefix_caching=False)
        found.append(pair.ask(text, **asked))
        pair.run()
    assert all(len(answer.vector) > 7 for answer in found[: len(POOLED)])
    assert [len(answer.prompt_logprobs) for answer in found[len(POOLED) :]] == [
        len(texts()[-2]) - 1,
        len(texts()[-1]) - 9,
    ]
    return found


def same(found: list[Answer], wanted: list[Answer]) -> None:
    for answer, expected in zip(found, wanted, strict=True):
        assert answer.tokens == expected.tokens
        assert len(answer.vector) == len(expected.vector)
        if expected.vector:
            assert np.abs(np.array(answer.vector) - expected.vector).max() < MAX_ERROR
        assert len(answer.prompt_logprobs) == len(expected.prompt_logprobs)
        for (ids, values, _), (their_ids, their_values, _) in zip(
            answer.prompt_logprobs, expected.prompt_logprobs, strict=True
        ):
            assert ids[0] == their_ids[0]
            assert np.abs(np.array(values) - their_values).max() < 20 * MAX_ERROR


@pytest.mark.parametrize("most", [2048, 37])
def test_in_shared_steps_and_in_chunks(replica: Replica, alone: list[Answer], most: int) -> None:
    """Repeats the requests with cached prefixes, which vectors of single tokens must not use."""
    pair = Pair(replica, max_num_batched_tokens=most)
    chats = [pair.ask(prompt, 30, temperature=0.7, seed=3) for prompt in questions()[:4]]
    pair.turn()
    first = ask_all(pair)
    pair.run()
    same(first, alone)
    again = ask_all(pair)
    pair.run()
    same(again, alone)
    assert pair.core.counts.cached_tokens > 100
    assert all(answer.end is not None for answer in chats)


def test_preempted_in_the_middle_of_a_prompt(replica: Replica, alone: list[Answer]) -> None:
    """Partial results of a prompt are neither lost nor reported twice, although the next step is in flight."""
    pair = Pair(replica, max_num_batched_tokens=64)
    chats = [pair.ask(prompt, 60, eos=()) for prompt in questions()[:3]]
    found = ask_all(pair)
    pair.preempt_often(60)
    pair.run()
    same(found, alone)
    assert pair.core.counts.preemptions > 5
    assert all(answer.end is not None for answer in chats)
