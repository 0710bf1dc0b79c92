"""Each feature returns the same answer over every delivery path: whole or streamed, over gRPC or HTTP, echoed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import httpx
import pytest

import quire.kernels.cpu
from quire import SamplingParams
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.outputs import collect
from quire.requests import RequestOptions
from quire.shared.errors import QuireError
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.matrix.features import REQUESTS
from tests.matrix.requesting import Answer, Question, ask_now, assert_same, prompts, question, result_of

pytestmark = pytest.mark.skipif(
    quire.kernels.cpu.unavailable() is not None, reason="plain torch rounds otherwise in other batches"
)

STREAMS = {
    "each token": RequestOptions(),
    "seven tokens a message": RequestOptions(stream_interval=7),
    "a salted cache": RequestOptions(cache_salt="own", tenant="somebody"),
    "KV that is kept": RequestOptions(kv_priority="high"),
}
HTTP: Mapping[str, Mapping[str, Any]] = {"whole": {}, "stream": {"stream": True}, "echo": {"echo": True}}
NOT_OVER_HTTP = {
    "whole": {"detokenize", "flat_logprobs"},
    "stream": {"detokenize", "flat_logprobs", "prompt_logprobs", "named_prompt_logprobs"},
    "echo": {"detokenize", "flat_logprobs"},
}


@pytest.fixture(scope="module")
def questions(cluster: Cluster) -> dict[str, Question]:
    prompt = prompts(cluster)[0]
    return {name: question(prompt, name) for name in REQUESTS}


@pytest.fixture(scope="module")
def whole(cluster: Cluster, questions: dict[str, Question]) -> dict[str, Answer]:
    return ask_now(cluster, questions)


@pytest.mark.parametrize("way", STREAMS)
async def test_a_stream_adds_up_to_the_whole(
    cluster: Cluster, questions: dict[str, Question], whole: dict[str, Answer], way: str
) -> None:
    client = AsyncClient(cluster.grpc_address)

    async def read(asked: Question) -> Answer:
        try:
            messages = [message async for message in client.messages(asked.prompt, asked.params, STREAMS[way])]
        except QuireError as error:
            return error
        return collect(messages, asked.prompt)

    answers = await asyncio.gather(*map(read, questions.values()))
    await client.close()
    for name, answer in zip(questions, answers, strict=True):
        assert_same(answer, whole[name], name)


async def test_a_stream_that_is_taken_up_again_adds_up_to_the_whole(
    cluster: Cluster, questions: dict[str, Question], whole: dict[str, Answer]
) -> None:
    """Resumed by id after its second message; beams, whose results come at the end, are refused."""
    client = AsyncClient(cluster.grpc_address)

    async def read(name: str, asked: Question) -> Answer:
        options = RequestOptions(request_id=f"taken-up-{name}", resumable=True)
        begun = client.messages(asked.prompt, asked.params, options)
        try:
            before = [await anext(begun), await anext(begun)]
        except StopAsyncIteration:  # which had one
            before = []
        except QuireError as error:
            return error
        await begun.aclose()
        call = client._inference.Attach(pb.AttachRequest(request_id=options.request_id, offset=len(before)))
        return collect([*before, *[message.generate async for message in call]], asked.prompt)

    answers = dict(zip(questions, await asyncio.gather(*map(read, questions, questions.values())), strict=True))
    await client.close()
    assert "beam_search" in str(answers.pop("beams"))
    for name, answer in answers.items():
        assert_same(answer, whole[name], name)


@pytest.mark.parametrize("way", HTTP)
async def test_http_returns_what_grpc_returns(
    cluster: Cluster, questions: dict[str, Question], whole: dict[str, Answer], way: str
) -> None:
    asked = {name: one for name, one in questions.items() if name not in NOT_OVER_HTTP[way]}
    async with httpx.AsyncClient(base_url=f"http://{cluster.http_address}", timeout=60) as http:
        bodies = [body(one.prompt, one.params) | HTTP[way] for one in asked.values()]
        replies = await asyncio.gather(*(http.post("/v1/completions", json=sent) for sent in bodies))
    with Client(cluster.grpc_address) as client:
        echoed = {name: client.detokenize(one.prompt) if way == "echo" else "" for name, one in asked.items()}
    for name, reply in zip(asked, replies, strict=True):
        assert reply.status_code == 200, reply.text
        found = choices(reply.text)
        for sample in result_of(whole[name]).outputs:
            stop = "repetition_detected" if sample.finish_reason == "repetition" else sample.stop_reason
            expected = echoed[name] + sample.text, sample.token_ids, sample.finish_reason, stop
            assert found[sample.index] == expected, name


def body(prompt: list[int], params: SamplingParams) -> dict[str, Any]:
    """The same request as an HTTP body."""
    given = {name: value for name, value in asdict(params).items() if value not in (None, (), {}, False)}
    given["temperature"] = params.temperature
    if (search := given.pop("beam_search", None)) is not None:
        given |= {"use_beam_search": True, "n": search["width"]}
    if (form := given.pop("structured_output", None)) is not None:
        given["structured_outputs"] = {name: value for name, value in form.items() if value}
    if "logprob_token_ids" in given:
        given["logprobs"] = 1
    return {"prompt": prompt, "return_token_ids": True, **given}


def choices(reply: str) -> dict[int, tuple[str, list[int], str | None, int | str | None]]:
    """Text, token ids and finish reasons by index, of a whole answer or of a stream's events."""
    events = [line.removeprefix("data: ") for line in reply.splitlines() if line and line != "data: [DONE]"]
    found: dict[int, tuple[str, list[int], str | None, int | str | None]] = {}
    for choice in (choice for event in events for choice in json.loads(event)["choices"]):
        text, ids, finish, stop = found.get(choice["index"], ("", [], None, None))
        found[choice["index"]] = (
            text + choice["text"],
            ids + choice["token_ids"],
            choice["finish_reason"] or finish,
            choice["stop_reason"] or stop,
        )
    return found
