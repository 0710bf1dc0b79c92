"""Resumable streams over HTTP: chats, completions and background responses, at two frontends with one Redis."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format

from quire.async_client import AsyncClient
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.redis_server import RedisServer
from tests.services.frontend.streams.events import Event, read, resumed
from tests.services.frontend.streams.pair import Pair, paired
from tests.services.frontend.streams.reading import Sampling, asked, attach, bare

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 30, "stream": True, "resumable": True}
SAID = [{"role": "user", "content": "hi"}]
NUMBERS = itertools.count()


PATHS = {
    "/v1/chat/completions": {"messages": SAID, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": [70, 71], "logprobs": 1, "echo": True},
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_can_be_attached_after_any_event_at_any_frontend(pair: Pair, path: str) -> None:
    name = f"any-{next(NUMBERS)}"
    events = await read(pair.a, "POST", path, json={**ASK, **PATHS[path], "request_id": name})
    assert [event.id for event in events] == list(range(len(events)))
    assert events[-1].data == "[DONE]"
    for after in range(-1, len(events) - 1):
        assert await resumed(pair.b, name, after) == events[after + 1 :]
    assert await resumed(pair.a, name) == events


@pytest.mark.parametrize("path", PATHS)
async def test_a_reader_takes_over_from_a_dead_frontend(pair: Pair, path: str) -> None:
    for num_before in (1, 6):
        name = f"dead-{next(NUMBERS)}"
        body = {**ASK, **PATHS[path], "request_id": name}
        before = await read(pair.a, "POST", path, (pair.script, num_before), json=body)
        await pair.kill_maker(name)
        found = [*before, *await resumed(pair.b, name, num_before - 1)]
        assert [event.id for event in found] == list(range(len(found)))
        assert await resumed(pair.b, name) == found
        whole = await read(pair.a, "POST", path, json={**ASK, **PATHS[path]})
        assert _said(found) == _said(whole)
        chunks = [json.loads(event.data) for event in found[:-1]]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


def _said(events: list[Event]) -> tuple[str, list[Any], list[Any]]:
    """Returns text, tokens and finish reasons of a stream's choices."""
    text, tokens, ends = "", [], []
    for event in events[:-1]:
        for choice in json.loads(event.data)["choices"]:
            text += choice.get("text", "") or choice.get("delta", {}).get("content") or ""
            tokens += (choice["logprobs"] or {}).get("tokens", [])
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, tokens, ends


async def test_a_browser_comes_back_by_itself(pair: Pair) -> None:
    """EventSource sends its last event id, and stops reconnecting at 204."""
    events = await read(pair.a, "POST", "/v1/chat/completions", json={**ASK, "messages": SAID, "request_id": "browser"})
    path = "/v1/streams/browser"
    assert await read(pair.b, "GET", path, headers={"last-event-id": "4"}) == events[5:]
    last = {"last-event-id": str(events[-1].id)}
    assert (await pair.b.http.get(path, headers=last)).status_code == 204
    refused = await pair.b.http.get(path, headers={"last-event-id": "x"})
    assert (refused.status_code, "'x'" in refused.text) == (400, True)


async def test_a_stream_belongs_to_its_tenant_and_ends_when_it_is_deleted(pair: Pair) -> None:
    body = {**ASK, "messages": SAID, "request_id": "mine", "max_tokens": 4000}
    owner = {"x-tenant": "t"}
    await read(pair.a, "POST", "/v1/chat/completions", (pair.script, 2), json=body, headers=owner)
    path = "/v1/streams/mine"
    for call in (pair.b.http.get(path), pair.b.http.delete(path)):
        assert (await call).status_code == 404
    deleted = await pair.b.http.delete(path, headers=owner)
    pair.script.resume()
    assert deleted.json() == {"id": "mine", "object": "stream", "cancelled": True}
    events = await read(pair.b, "GET", path, headers=owner)
    assert _said(events)[2] == ["abort"]


@pytest.mark.parametrize(
    ("body", "headers", "told"),
    [
        ({"stream": False}, {}, "resumable requires stream=true"),
        ({"retention_s": 301}, {}, "got 301"),
        ({"resumable": False, "retention_s": 3}, {}, "retention_s=3 requires"),
        ({"prompt": ["one", "two"]}, {}, "one prompt, got 2"),
        ({}, {"x-request-timeout": "5"}, "x-request-timeout"),
    ],
)
async def test_what_cannot_be_kept_is_refused(
    pair: Pair, body: dict[str, Any], headers: dict[str, str], told: str
) -> None:
    path = "/v1/completions"
    refused = await pair.a.http.post(path, json={**ASK, "prompt": "x", **body}, headers=headers)
    assert (refused.status_code, told in refused.text) == (400, True), refused.text


async def test_a_stream_that_breaks_off_says_so_to_all_its_readers(tool_folder: Path, server: RedisServer) -> None:
    async with paired(tool_folder, server, stream_limits={"messages": 8}) as pair:
        body = {**ASK, "messages": SAID, "request_id": "broken", "max_tokens": 400}
        events = await read(pair.a, "POST", "/v1/chat/completions", json=body)
        assert "messages=8" in json.loads(events[-2].data)["error"]["message"]
        assert events[-1].data == "[DONE]"
        assert await resumed(pair.b, "broken") == events


def chat(request_id: str) -> pb.ChatRequest:
    turn = pb.ChatMessage(role="user", content="hi")
    sampling = Sampling(max_tokens=20, ignore_eos=True, seed=30)
    options = pb.RequestOptions(request_id=request_id)
    return pb.ChatRequest(messages=[turn], sampling=sampling, options=options, resumable=True)


@pytest.mark.parametrize("method", ["generate", "chat"])
async def test_a_stream_of_grpc_is_read_over_http(pair: Pair, method: str) -> None:
    """Also if the frontend that produces it dies."""
    name = f"from-grpc-{method}"
    begun = pair.a.inference.Generate(asked(name)) if method == "generate" else pair.a.inference.Chat(chat(name))
    before = await pair.begun(begun, 3)
    await pair.kill_maker(name)
    events = await resumed(pair.b, name, 1)
    whole = await bare(attach(pair.b, name))
    assert [event.id for event in events] == list(range(2, len(whole)))
    read_over_http = [json_format.Parse(event.data, pb.AttachResponse()) for event in events]
    assert [getattr(message, method) for message in read_over_http] == whole[2:]
    assert before == whole[:3]
    over = await pair.b.http.get(f"/v1/streams/{name}", headers={"last-event-id": str(len(whole) - 1)})
    assert over.status_code == 204


@pytest.mark.parametrize("path", [*PATHS, "/v1/responses"])
async def test_a_stream_of_http_is_read_over_grpc_and_from_python(pair: Pair, path: str) -> None:
    name = f"from-http-{next(NUMBERS)}"
    response = {"input": "hi", "background": True, "stream": True, "max_output_tokens": 24}
    body = response if path == "/v1/responses" else {**ASK, **PATHS[path]}
    events = await read(pair.a, "POST", path, json={**body, "request_id": name})
    messages = await bare(attach(pair.b, name, 2))
    assert [(message.offset, message.data) for message in messages] == events[2:]
    async with AsyncClient(pair.b.frontend.grpc_address) as client:
        deltas = [delta async for delta in client.attach(name)]
    assert [(delta.offset, delta.event.data) for delta in deltas if delta.event is not None] == events
    kinds = [delta.event.type for delta in deltas if delta.event is not None]
    if path == "/v1/responses":
        assert kinds == [json.loads(event.data)["type"] for event in events]
    else:
        assert set(kinds) == {""}
    for wrong in ("from-grpc-chat", "none"):
        answer = await pair.b.http.get(f"/v1/responses/resp_{wrong}", params={"stream": "true"})
        assert answer.status_code == 404
