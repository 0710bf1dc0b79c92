"""Resumable streams over HTTP: chats, completions and responses in the background, at two frontends with one Redis."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import pytest_asyncio

from services.frontend.streams.terms import Terms
from shared.settings.stream_limits import StreamLimits
from tests.redis_server import RedisServer
from tests.services.frontend.running import Running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up
from tests.services.frontend.speech import saying
from tests.services.frontend.streams.pair import Pair, paired
from tests.services.frontend.streams.reading import asked, attach, everything, refusal
from tests.services.frontend.talking import CALLS, WEATHER, talking_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

ASK: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "seed": 30, "stream": True, "resumable": True}
SAID = [{"role": "user", "content": "hi"}]
NUMBERS = itertools.count()


class Event(NamedTuple):
    """Of a stream."""

    id: int
    data: str


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    started = RedisServer(tmp_path_factory.mktemp("redis"))
    started.start()
    yield started
    started.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(talking: Path, server: RedisServer) -> AsyncIterator[Pair]:
    async with paired(talking, server) as found:
        yield found


@pytest.fixture
def speaks(pair: Pair, talking: Path) -> Iterator[None]:
    """Calls tools."""
    pair.script.model = saying(talking, CALLS)
    yield
    pair.script.model = count_up


async def read(
    frontend: Running, method: str, path: str, pause: tuple[ScriptedScheduler, int] | None = None, **more: Any
) -> list[Event]:
    """`pause`: after so many events the model says nothing more, and the client leaves."""
    found: list[Event] = []
    async with frontend.http.stream(method, path, **more) as answer:
        assert answer.status_code == 200, await answer.aread()
        number = -1
        async for line in answer.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            elif line.startswith("data: "):
                found.append(Event(number, line.removeprefix("data: ")))
                if pause is not None and len(found) == pause[1]:
                    pause[0].pause()
                    return found
    return found


async def resumed(frontend: Running, request_id: str, after: int = -1) -> list[Event]:
    return await read(frontend, "GET", f"/v1/streams/{request_id}", params={"starting_after": after})


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
    monkeypatch.setattr(pair.a.frontend.core.streams, "terms", Terms(300.0, StreamLimits(messages=8)))
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


@pytest.mark.usefixtures("speaks")
async def test_a_response_in_the_background_survives_its_frontend(pair: Pair) -> None:
    """With tools: the ids of items and calls are those that its reader has seen."""
    body = {
        "input": "How is the weather?",
        "stream": True,
        "background": True,
        "tools": [{"type": "function", **WEATHER["function"]}],
    }
    for num_before in (9, 16):
        name = f"background-{next(NUMBERS)}"
        sent = {**body, "request_id": name}
        before = await read(pair.a, "POST", "/v1/responses", (pair.script, num_before), json=sent)
        response_id = json.loads(before[0].data)["response"]["id"]
        assert response_id == f"resp_{name}"
        polled = (await pair.b.http.get(f"/v1/responses/{response_id}")).json()
        assert (polled["status"], polled["background"]) == ("in_progress", True)
        await pair.kill_maker(name)
        params = {"stream": "true", "starting_after": num_before - 1}
        after = await read(pair.b, "GET", f"/v1/responses/{response_id}", params=params)
        events = [json.loads(event.data) for event in [*before, *after]]
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        told = {event["output_index"]: event["item"] for event in events if event["type"].endswith("item.added")}
        done = events[-1]["response"]
        assert (events[-1]["type"], done["status"]) == ("response.completed", "completed")
        assert [item["id"] for item in done["output"]] == [told[at]["id"] for at in range(len(told))]
        calls = [item for item in done["output"] if item["type"] == "function_call"]
        assert [call["call_id"] for call in calls] == [
            item["call_id"] for item in told.values() if item["type"] == "function_call"
        ]
        assert len(calls) == 2
        assert (await pair.a.http.get(f"/v1/responses/{response_id}")).json() == done


async def test_openais_client_takes_a_response_up_and_ends_it(pair: Pair) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pair.b.url}/v1", api_key="none", max_retries=0) as client:
        extra = {"ignore_eos": True}
        stream = await client.responses.create(
            model="talking", input="hi", background=True, stream=True, max_output_tokens=4000, extra_body=extra
        )
        seen = []
        async for event in stream:
            seen.append(event)
            if len(seen) == 5:
                break
        response_id = seen[0].response.id
        again = await client.responses.retrieve(response_id, stream=True, starting_after=2)
        cancelled = await client.responses.cancel(response_id)
        rest = [event async for event in again]
    assert cancelled.status == "cancelled"
    assert [event.model_dump() for event in rest[:2]] == [event.model_dump() for event in seen[3:]]
    assert rest[-1].response.status == "cancelled"


async def test_background_without_a_stream_is_refused_by_name(pair: Pair) -> None:
    refused = await pair.a.http.post("/v1/responses", json={"input": "hi", "background": True})
    assert (refused.status_code, "background" in refused.text) == (400, True)
    missing: httpx.Response = await pair.a.http.get("/v1/responses/resp_none", params={"stream": "true"})
    assert missing.status_code == 404
