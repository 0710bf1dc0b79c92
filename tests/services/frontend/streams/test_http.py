"""Resumable streams over HTTP: chats, completions and responses in the background, at two frontends with one Redis."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from services.frontend.streams.terms import Terms
from shared.settings.stream_limits import StreamLimits
from tests.services.frontend.streams.events import Event, read, resumed
from tests.services.frontend.streams.pair import Pair
from tests.services.frontend.streams.reading import asked, attach, everything, refusal

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 30, "stream": True, "resumable": True}
SAID = [{"role": "user", "content": "hi"}]
NUMBERS = itertools.count()


PATHS = {
    "/v1/chat/completions": {"messages": SAID, "stream_options": {"include_usage": True}},
    "/v1/completions": {"prompt": [70, 71], "logprobs": 1, "echo": True},
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_is_taken_up_behind_any_event_at_any_frontend(pair: Pair, path: str) -> None:
    name = f"any-{next(NUMBERS)}"
    events = await read(pair.a, "POST", path, json={**ASK, **PATHS[path], "request_id": name})
    assert [event.id for event in events] == list(range(len(events)))
    assert events[-1].data == "[DONE]"
    for after in range(-1, len(events) - 1):
        assert await resumed(pair.b, name, after) == events[after + 1 :]
    assert await resumed(pair.a, name) == events


@pytest.mark.parametrize("path", PATHS)
async def test_whoever_reads_goes_on_with_what_a_dead_frontend_has_left(pair: Pair, path: str) -> None:
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
    """Text, tokens and ends of a stream's choices."""
    text, tokens, ends = "", [], []
    for event in events[:-1]:
        for choice in json.loads(event.data)["choices"]:
            text += choice.get("text", "") or choice.get("delta", {}).get("content") or ""
            tokens += (choice["logprobs"] or {}).get("tokens", [])
            ends += [choice["finish_reason"]] if choice["finish_reason"] else []
    return text, tokens, ends


async def test_a_browser_comes_back_by_itself(pair: Pair) -> None:
    """EventSource says what it had last, and stops where there is nothing more (204)."""
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
        ({"stream": False}, {}, "resumable is for streams"),
        ({"retention_s": 301}, {}, "got 301"),
        ({"resumable": False, "retention_s": 3}, {}, "retention_s=3 needs"),
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


async def test_a_stream_that_breaks_off_says_so_to_all_its_readers(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair.a.frontend._streams, "terms", Terms(300.0, StreamLimits(messages=8)))
    body = {**ASK, "messages": SAID, "request_id": "broken", "max_tokens": 400}
    events = await read(pair.a, "POST", "/v1/chat/completions", json=body)
    assert "messages=8" in json.loads(events[-2].data)["error"]["message"]
    assert events[-1].data == "[DONE]"
    assert await resumed(pair.b, "broken") == events


async def test_each_port_names_the_other_for_its_streams(pair: Pair) -> None:
    await everything(pair.a.inference.Generate(asked("over-grpc")))
    refused = await pair.b.http.get("/v1/streams/over-grpc")
    assert (refused.status_code, "InferenceService.Attach" in refused.text) == (409, True)
    await read(pair.a, "POST", "/v1/chat/completions", json={**ASK, "messages": SAID, "request_id": "over-http"})
    assert "/v1/streams/over-http" in ((await refusal(attach(pair.b, "over-http"))).details() or "")
