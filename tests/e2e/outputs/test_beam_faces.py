"""Beam search as clients see it: gRPC messages, HTTP bodies and events, Python objects."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from quire import LLM, AsyncLLM, BeamSearch, SamplingParams
from quire.async_client import AsyncClient
from quire.client import Client
from quire.cluster import Cluster
from quire.shared.errors import DeadlineExceeded, InvalidArgument
from tests.e2e.conftest import running_cluster
from tests.e2e.outputs.test_beam_search import engine_core_of

PROMPTS = ["Once upon a time there was", "The lighthouse keeper"]
QUESTION = [{"role": "user", "content": "What is 23 + 45?"}]
PERIOD = 29  # of quire-tiny
SEARCH = SamplingParams(n=3, beam_search=BeamSearch(4), max_tokens=16)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture
def http(cluster: Cluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=f"http://{cluster.http_address}/v1", timeout=60) as client:
        yield client


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    assert reply.status_code == 200, reply.text
    lines = [line.removeprefix("data: ") for line in reply.text.splitlines() if line]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


async def test_beam_results_are_complete_and_best_first_over_grpc(cluster: Cluster) -> None:
    client = AsyncClient(cluster.grpc_address)
    messages = [message async for message in client.messages(PROMPTS[0], SEARCH)]
    await client.close()
    assert [message.index for message in messages] == [0, 1, 2]
    assert all(message.finish_reason and message.text for message in messages)
    scores = [message.score for message in messages]
    assert scores == sorted(scores, reverse=True)
    assert messages[-1].usage.completion_tokens == sum(len(message.token_ids) for message in messages)


async def test_python_clusters_and_clients_agree(cluster: Cluster, client: Client) -> None:
    expected = [[(o.text, o.score) for o in result.outputs] for result in client.generate(PROMPTS, SEARCH)]
    with LLM(address=cluster.grpc_address) as llm:
        found = llm.generate(PROMPTS, SEARCH)
        answer = llm.chat(QUESTION, SamplingParams(beam_search=BeamSearch(3), max_tokens=8))[0]
    assert [[(o.text, o.score) for o in result.outputs] for result in found] == expected
    assert answer.text == "68"
    async with AsyncLLM(address=cluster.grpc_address) as own:
        streamed = [delta async for delta in own.stream(PROMPTS[0], SEARCH)]
    assert [delta.text for delta in streamed] == [text for text, _ in expected[0]]
    assert all(delta.finish_reason for delta in streamed)


def test_several_prompts_in_a_body_are_searches_of_their_own(http: httpx.Client, client: Client) -> None:
    body = {"prompt": PROMPTS, "n": 2, "use_beam_search": True, "max_tokens": 12, "early_stopping": True}
    choices = http.post("/completions", json=body).json()["choices"]
    params = SamplingParams(n=2, beam_search=BeamSearch(2, early_stopping=True), max_tokens=12)
    expected = [output.text for result in client.generate(PROMPTS, params) for output in result.outputs]
    assert [choice["index"] for choice in choices] == [0, 1, 2, 3]
    assert [choice["text"] for choice in choices] == expected


def test_logprobs_of_a_beam_add_up_to_its_score(http: httpx.Client, client: Client) -> None:
    body = {"prompt": PROMPTS[0], "n": 4, "use_beam_search": True, "max_tokens": 12, "logprobs": 2}
    choices = http.post("/completions", json=body).json()["choices"]
    results = client.generate(PROMPTS[0], SamplingParams(n=4, beam_search=BeamSearch(4), max_tokens=12))[0].outputs
    for choice, result in zip(choices, results, strict=True):
        told = choice["logprobs"]["token_logprobs"]
        assert len(told) == len(result.token_ids)
        assert sum(told) / len(told) == pytest.approx(result.score, abs=1e-3)
        assert all(2 <= len(top) <= 3 for top in choice["logprobs"]["top_logprobs"])


def test_a_chat_as_events(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "n": 2, "use_beam_search": True, "max_tokens": 8, "length_penalty": 0.0}
    whole = http.post("/chat/completions", json=body).json()
    *chunks, last = events(
        http.post("/chat/completions", json={**body, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert last["usage"] == whole["usage"] | {"prompt_tokens_details": last["usage"]["prompt_tokens_details"]}
    said = {0: "", 1: ""}
    ends = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        said[choice["index"]] += choice["delta"].get("content") or ""
        ends[choice["index"]] = choice["finish_reason"] or ends.get(choice["index"])
    assert said == {choice["index"]: choice["message"]["content"] for choice in whole["choices"]}
    assert ends == {choice["index"]: choice["finish_reason"] for choice in whole["choices"]}


@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_token_ends_a_beam(client: Client, kept: bool) -> None:
    params = SamplingParams(
        n=3, beam_search=BeamSearch(4), max_tokens=40, stop_token_ids=[PERIOD], include_stop_str_in_output=kept
    )
    outputs = client.generate(PROMPTS[0], params)[0].outputs
    ended = [output for output in outputs if output.stop_reason == PERIOD]
    assert ended
    for output in ended:
        assert (output.finish_reason, output.token_ids.index(PERIOD)) == ("stop", len(output.token_ids) - 1)
        assert output.text.endswith(".") == kept


def test_calls_that_are_free_work_and_those_that_are_bound_are_refused(http: httpx.Client) -> None:
    body = {"messages": QUESTION, "tools": [TOOL], "use_beam_search": True, "n": 2, "max_tokens": 16}
    assert len(http.post("/chat/completions", json=body).json()["choices"]) == 2
    required = http.post("/chat/completions", json={**body, "tool_choice": "required"})
    strict = http.post("/chat/completions", json={**body, "tools": [with_strict(TOOL)]})
    form = http.post("/chat/completions", json={**body, "tools": None, "response_format": {"type": "json_object"}})
    for reply, param in ((required, "tool_choice"), (strict, "tools"), (form, "response_format")):
        error = reply.json()["error"]
        assert (reply.status_code, error["param"]) == (400, param)
        assert "not supported together with beam search" in error["message"]


def with_strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "function": {**tool["function"], "strict": True}}


def test_a_deadline_ends_a_search_and_frees_its_beams(cluster: Cluster) -> None:
    params = SamplingParams(beam_search=BeamSearch(16), max_tokens=4000, ignore_eos=True)
    with Client(cluster.grpc_address) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate(PROMPTS[0], params, timeout_s=1.0)
        while any(engine_core_of(client)):
            pass


def test_searches_that_a_worker_has_no_room_for() -> None:
    """Too wide for its slots: refused. Too long for its blocks: the first gets them, the others wait."""
    settings = {"worker": {"max_num_seqs": 8, "num_blocks": 24}, "scheduler": {"watermark": 0.0}}
    with running_cluster(**settings) as small, Client(small.grpc_address) as client:
        with pytest.raises(InvalidArgument, match=r"beam_search\.width: 9 beams are more than the 8 slots"):
            client.generate("x", SamplingParams(beam_search=BeamSearch(9)))
        alone = client.generate(PROMPTS[0], SamplingParams(n=4, beam_search=BeamSearch(4), max_tokens=60))[0]
        crowd = client.generate([PROMPTS[0]] * 6, SamplingParams(n=4, beam_search=BeamSearch(4), max_tokens=60))
        for result in crowd:
            assert [output.token_ids for output in result.outputs] == [output.token_ids for output in alone.outputs]
        while any(engine_core_of(client)):
            pass
