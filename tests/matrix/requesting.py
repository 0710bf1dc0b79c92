"""Many concurrent requests, and the parts of their answers that must not depend on other load."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pytest

from quire import SamplingParams
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.outputs import Logprob, RequestOutput
from quire.requests import DictPrompt, Prompt, RequestOptions
from quire.shared.errors import QuireError
from tests.matrix.checks import THINK
from tests.matrix.features import params

STORY = (
    "Once upon a time there was a lighthouse keeper who counted the ships that passed by in the night, and the boats "
    "that came home in the morning. One night"
)
ENDINGS = (" a storm came up from the sea.", " nobody knew how many they were.", " he saw a")
PLACEHOLDER = 9  # of a picture, for quire-tiny
TOLERANCE = 1e-4  # of log-probabilities, whose sums may be taken in another order

PLAIN = RequestOptions()

Answer = RequestOutput | QuireError

Key = TypeVar("Key")


@dataclass(frozen=True)
class Question:
    prompt: Prompt
    params: SamplingParams
    options: RequestOptions


@dataclass(frozen=True)
class Said:
    """Comparable output of one sample."""

    token_ids: tuple[int, ...]
    text: str
    finish: tuple[str | None, int | str | None]
    logprobs: tuple[float, ...]
    prompt_logprobs: tuple[float, ...]
    score: float | None


def prompts(cluster: Cluster) -> list[list[int]]:
    """Several prompts with a common prefix."""
    with Client(cluster.grpc_address) as client:
        return [client.tokenize(STORY + ending) for ending in ENDINGS]


def picture_prompt(cluster: Cluster) -> DictPrompt:
    """A prompt with the common prefix, longer than a step of some scenarios, with a picture in it."""
    pixels = np.random.default_rng(5).integers(0, 256, (90, 120, 3), dtype=np.uint8)
    with Client(cluster.grpc_address) as client:
        before, after = client.tokenize(STORY), client.tokenize(" This is what he saw:")
    return {"prompt_token_ids": [*before, PLACEHOLDER, *after], "multi_modal_data": {"image": pixels}}


def question(prompt: Prompt, *names: str, options: RequestOptions = PLAIN) -> Question:
    """Request with these features; where reasoning is to be bounded, the prompt begins it."""
    return Question(_thinking(prompt) if "thinking" in names else prompt, params(*names), options)


def _thinking(prompt: Prompt) -> Prompt:
    """Returns a prompt of tokens that ends with the begin of reasoning."""
    if isinstance(prompt, dict):
        return {**prompt, "prompt_token_ids": [*prompt["prompt_token_ids"], THINK]}
    assert not isinstance(prompt, str)
    return [*prompt, THINK]


async def ask_all(client: AsyncClient, questions: Mapping[Key, Question]) -> dict[Key, Answer]:
    """Sends all requests at once."""
    answers = await asyncio.gather(*(_ask(client, one) for one in questions.values()))
    return dict(zip(questions, answers, strict=True))


async def _ask(client: AsyncClient, one: Question) -> Answer:
    try:
        return await client.generate(one.prompt, one.params, one.options)
    except QuireError as error:
        return error


def ask_now(cluster: Cluster, questions: Mapping[Key, Question]) -> dict[Key, Answer]:
    async def ask() -> dict[Key, Answer]:
        client = AsyncClient(cluster.grpc_address)
        try:
            return await ask_all(client, questions)
        finally:
            await client.close()

    return asyncio.run(ask())


def result_of(answer: Answer) -> RequestOutput:
    """Returns the result; raises the refusal."""
    if isinstance(answer, QuireError):
        raise answer
    return answer


def said(answer: Answer) -> list[Said]:
    """Comparable output of every sample."""
    result = result_of(answer)
    return [
        Said(
            tuple(sample.token_ids),
            sample.text,
            (sample.finish_reason, sample.stop_reason),
            _values(sample.logprobs or ()),
            _values(result.prompt_logprobs or ()),
            sample.score,
        )
        for sample in result.outputs
    ]


def _values(entries: Sequence[Logprob]) -> tuple[float, ...]:
    return tuple(value for entry in entries for value in (entry.logprob, entry.rank, *entry.top.values()))


def assert_same(found: Answer, expected: Answer, name: str) -> None:
    for ours, theirs in zip(said(found), said(expected), strict=True):
        assert ours.token_ids == theirs.token_ids, f"{name}: {ours} for {theirs}"
        assert (ours.text, ours.finish) == (theirs.text, theirs.finish), name
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=TOLERANCE), name
        assert ours.prompt_logprobs == pytest.approx(theirs.prompt_logprobs, abs=TOLERANCE), name
        assert ours.score == pytest.approx(theirs.score, abs=TOLERANCE), name
