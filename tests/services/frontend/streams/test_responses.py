"""Background responses, streamed and polled."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from quire.services.frontend.openai_edge import resumable
from quire.services.frontend.openai_edge.responses.body import ResponsesBody
from quire.services.frontend.streams.store import DELETED_S
from tests.redis_server import RedisServer
from tests.services.frontend.running import Running
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.streams.events import read
from tests.services.frontend.streams.pair import Pair, paired
from tests.services.frontend.tool_model import WEATHER
from tests.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="module")

NUMBERS = itertools.count()
LONG = {"input": "hi", "background": True, "seed": 30, "ignore_eos": True, "max_output_tokens": 3000}


@pytest.mark.usefixtures("speaks")
async def test_a_response_in_the_background_survives_its_frontend(pair: Pair) -> None:
    """With tools: the ids of items and calls stay those that the reader has seen."""
    body = {
        "input": "How is the weather?",
        "stream": True,
        "background": True,
        "tools": [{"type": "function", **tool} for tool in (WEATHER["function"], {"name": "now"})],
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


async def begun(frontend: Running, headers: dict[str, str] | None = None, **body: Any) -> dict[str, Any]:
    answer = await frontend.http.post("/v1/responses", json={**LONG, **body}, headers=headers)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    assert (found["status"], found["background"], found["output"]) == ("queued", True, [])
    return found


async def get(frontend: Running, response_id: str, **more: Any) -> httpx.Response:
    return await frontend.http.get(f"/v1/responses/{response_id}", **more)


async def until(frontend: Running, response_id: str, *statuses: str) -> dict[str, Any]:
    """Polls, as clients do."""

    async def ask() -> dict[str, Any]:
        answer = await get(frontend, response_id)
        found: dict[str, Any] = answer.json()
        assert answer.status_code == 200, found
        assert found["status"] in (*statuses, "queued", "in_progress"), found
        return found

    return await eventually(ask, lambda found: found["status"] in statuses)


def said(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


async def test_a_response_without_a_stream_is_begun_and_polled_at_any_frontend(pair: Pair) -> None:
    pair.script.pause()
    response = await begun(pair.a, max_output_tokens=40)
    for frontend in (pair.a, pair.b):
        assert (await get(frontend, response["id"])).json() == response
    pair.script.resume()
    done = [await until(frontend, response["id"], "incomplete") for frontend in (pair.a, pair.b)]
    assert done[0] == done[1]
    assert done[0]["usage"]["output_tokens"] == 40
    assert done[0]["created_at"] == response["created_at"]
    whole = await pair.a.http.post("/v1/responses", json={**LONG, "background": False, "max_output_tokens": 40})
    assert said(done[0]) == said(whole.json())
    events = await read(pair.b, "GET", f"/v1/responses/{response['id']}", params={"stream": "true"})
    assert json.loads(events[-1].data)["response"] == done[0]


@pytest.mark.parametrize("is_told", [False, True], ids=["queued", "in progress"])
async def test_polling_takes_over_from_a_dead_frontend(pair: Pair, is_told: bool) -> None:
    name = f"orphan-{next(NUMBERS)}"
    if not is_told:
        pair.script.pause()
    response = await begun(pair.a, request_id=name, max_output_tokens=400)
    if is_told:
        await until(pair.a, response["id"], "in_progress")
    await pair.kill_maker(name)
    done = await until(pair.b, response["id"], "incomplete")
    assert (done["id"], done["usage"]["output_tokens"]) == (response["id"], 400)
    whole = await pair.a.http.post("/v1/responses", json={**LONG, "background": False, "max_output_tokens": 400})
    assert said(done) == said(whole.json())


@pytest.mark.parametrize("is_told", [False, True], ids=["queued", "in progress"])
async def test_a_response_without_a_stream_is_cancelled_at_any_frontend(pair: Pair, is_told: bool) -> None:
    if not is_told:
        pair.script.pause()
    response = await begun(pair.a)
    if is_told:
        await until(pair.a, response["id"], "in_progress")
    cancelled = await pair.b.http.post(f"/v1/responses/{response['id']}/cancel")
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    done = await until(pair.a, response["id"], "cancelled")
    pair.script.resume()
    again = await pair.b.http.post(f"/v1/responses/{response['id']}/cancel")
    assert again.json() == done
    await pair.script.until(lambda: not pair.script.num_running)


async def test_a_request_that_the_next_frontend_cannot_read_stays_for_another(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a frontend of another version may have written it."""
    name = f"unreadable-{next(NUMBERS)}"
    response = await begun(pair.a, request_id=name, max_output_tokens=400)
    await until(pair.a, response["id"], "in_progress")
    await pair.kill_maker(name)
    streams = pair.b.frontend.core.streams
    with monkeypatch.context() as older:
        older.setitem(streams.restorers, "/v1/responses", lambda kept: ResponsesBody.model_validate_json("[]"))
        refused = await pair.b.http.get(f"/v1/responses/{response['id']}?stream=true&starting_after=9999")
        assert "ValidationError" in refused.text
    assert (await until(pair.b, response["id"], "incomplete"))["usage"]["output_tokens"] == 400


@pytest.mark.parametrize("stream", [False, True])
async def test_a_background_response_need_not_be_polled_before_it_ends(pair: Pair, stream: bool) -> None:
    """An unread stream is cancelled after its retention; a background response runs to its end unpolled."""
    name = f"unread-{stream}"
    body = {**LONG, "request_id": name, "max_output_tokens": 200}
    if stream:
        await read(pair.a, "POST", "/v1/responses", (pair.script, 3), json={**body, "stream": True})
    else:
        await begun(pair.a, **body)
        pair.script.pause()
    streams = pair.a.frontend.core.streams
    (made,) = (made for key, made in streams.local.items() if key.request_id == name)
    await eventually(lambda: not made.stream.num_readers)
    pair.clock.ahead_s = 400
    streams.expire(made.stream)
    pair.clock.ahead_s = 0
    pair.script.resume()
    done = await until(pair.a, f"resp_{name}", "incomplete", "cancelled")
    assert done["status"] == ("cancelled" if stream else "incomplete")


async def test_a_response_belongs_to_its_tenant(pair: Pair) -> None:
    owner = {"x-tenant": "t"}
    response = await begun(pair.a, headers=owner, max_output_tokens=5)
    path = f"/v1/responses/{response['id']}"
    for frontend in (pair.a, pair.b):
        for method, place in (("GET", path), ("POST", f"{path}/cancel"), ("DELETE", path)):
            assert (await frontend.http.request(method, place)).status_code == 404
    await eventually(
        lambda: get(pair.b, response["id"], headers=owner), lambda found: found.json()["status"] == "incomplete"
    )


async def test_a_response_is_deleted_everywhere_once_it_has_ended(pair: Pair) -> None:
    response = await begun(pair.a)
    path = f"/v1/responses/{response['id']}"
    refused = await pair.b.http.delete(path)
    assert (refused.status_code, "cancel it first" in refused.text) == (409, True)
    await pair.b.http.post(f"{path}/cancel")
    for frontend in (pair.a, pair.b):
        await until(frontend, response["id"], "cancelled")
    assert (await pair.a.http.delete(path)).json()["deleted"] is True
    for frontend in (pair.a, pair.b):
        assert (await frontend.http.get(path)).status_code == 404
    with pair.ask_redis() as client:
        (key,) = client.keys(f"*:{response['id'].removeprefix('resp_')}")
        assert (b":deleted:" in key, 0 < client.ttl(key) <= DELETED_S) == (True, True)


async def test_what_another_frontend_has_deleted_is_gone_where_it_was_made(pair: Pair) -> None:
    """The producer has a copy of its own, and may start another stream with the same id."""
    name = f"gone-{next(NUMBERS)}"
    response = await begun(pair.a, request_id=name, max_output_tokens=5)
    path = f"/v1/responses/{response['id']}"
    await until(pair.a, response["id"], "incomplete")
    assert (await pair.b.http.delete(path)).json()["deleted"] is True
    body = {"input": "and then?", "previous_response_id": response["id"], "max_output_tokens": 3}
    for method, place, sent in (
        ("GET", path, None),
        ("GET", f"{path}?stream=true", None),
        ("GET", f"{path}/input_items", None),
        ("POST", f"{path}/cancel", None),
        ("POST", "/v1/responses", body),
        ("DELETE", path, None),
    ):
        answer = await pair.a.http.request(method, place, json=sent)
        assert answer.status_code == 404, (method, place, answer.text)
    await begun(pair.b, request_id=name, max_output_tokens=7)
    for frontend in (pair.b, pair.a):
        assert (await until(frontend, response["id"], "incomplete"))["usage"]["output_tokens"] == 7


async def test_a_stream_that_another_frontend_has_deleted_is_gone_at_once_where_it_was_made(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"gone-{next(NUMBERS)}"
    streams = pair.a.frontend.core.streams
    monkeypatch.setattr(streams, "expire", lambda _: None)  # streams stored in Redis would soon be dropped here
    response = await begun(pair.a, request_id=name, max_output_tokens=5)
    await until(pair.a, response["id"], "incomplete")
    (made,) = (one for key, one in streams.local.items() if key.request_id == name)
    assert (await pair.b.http.delete(f"/v1/responses/{response['id']}")).status_code == 200
    assert (await pair.a.http.get(f"/v1/streams/{name}")).status_code == 404
    anew = await made.producer._store_again(is_last=True)
    assert not anew.is_owner, "a late producer does not store a deleted stream again"


async def test_a_copy_outlives_a_redis_that_has_lost_it_but_not_what_is_known_of_deletions(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"lost-{next(NUMBERS)}"
    response = await begun(pair.a, request_id=name, max_output_tokens=5)
    await until(pair.a, response["id"], "incomplete")
    with pair.ask_redis() as client:
        client.delete(*client.keys(f"*:{name}"))
    assert (await get(pair.a, response["id"])).json()["status"] == "incomplete"
    monkeypatch.setattr(resumable, "DELETED_S", 0)
    await pair.a.frontend.core.streams.heartbeat()
    assert (await get(pair.a, response["id"])).status_code == 404


async def test_a_response_can_be_continued_at_any_frontend(pair: Pair) -> None:
    """At its producer and elsewhere, the continued conversation is the same to the token."""
    first = await begun(pair.a, max_output_tokens=5)
    path = f"/v1/responses/{first['id']}"
    missing = await pair.b.http.post("/v1/responses", json={**LONG, "previous_response_id": "resp_none"})
    assert (missing.status_code, "resp_none" in missing.text) == (404, True)
    await until(pair.b, first["id"], "incomplete")
    body = {"input": "and then?", "previous_response_id": first["id"], "max_output_tokens": 3}
    answers = [(await one.http.post("/v1/responses", json=body)).json() for one in (pair.a, pair.b)]
    assert answers[0]["usage"]["input_tokens"] == answers[1]["usage"]["input_tokens"]
    prompts = [prompt_of(submission) for submission in pair.script.submissions[-2:]]
    assert prompts[0] == prompts[1]
    items = [(await one.http.get(f"{path}/input_items")).json() for one in (pair.a, pair.b)]
    assert items[0] == items[1]
    assert items[0]["data"]
    other = await pair.b.http.get(f"{path}/input_items", headers={"x-tenant": "other"})
    assert other.status_code == 404


async def test_a_response_that_breaks_off_has_failed(tool_folder: Path, server: RedisServer) -> None:
    async with paired(tool_folder, server, stream_limits={"messages": 8}) as pair:
        response = await begun(pair.a)
        for frontend in (pair.a, pair.b):
            failed = await until(frontend, response["id"], "failed")
            assert "messages=8" in failed["error"]["message"]


async def test_a_stream_that_may_not_be_continued_fails(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"unwanted-{next(NUMBERS)}"
    response = await begun(pair.a, request_id=name)
    await until(pair.a, response["id"], "in_progress")
    await pair.kill_maker(name)
    with monkeypatch.context() as other_version:
        other_version.delitem(pair.b.frontend.core.streams.restorers, "/v1/responses")
        failed = await until(pair.b, response["id"], "failed", "in_progress")
        assert failed["status"] == "in_progress"  # a frontend of another version may be able to
    await pair.b.http.post(f"/v1/responses/{response['id']}/cancel")
    await until(pair.b, response["id"], "cancelled")


async def test_a_refusal_is_the_answer(pair: Pair) -> None:
    taken = await begun(pair.a, request_id="taken", max_output_tokens=5)
    for body, told in (({"request_id": "taken"}, "taken"), ({"store": False}, "store"), ({"model": "none"}, "none")):
        refused = await pair.a.http.post("/v1/responses", json={**LONG, **body})
        assert refused.status_code in (400, 404, 409), refused.text
        assert told in refused.text
    await until(pair.b, taken["id"], "incomplete")
    assert (await get(pair.a, "resp_none")).status_code == 404
    await read(
        pair.a,
        "POST",
        "/v1/completions",
        json={"prompt": "x", "max_tokens": 2, "stream": True, "resumable": True, "request_id": "no-response"},
    )
    for method in ("GET", "DELETE"):
        assert (await pair.b.http.request(method, "/v1/responses/resp_no-response")).status_code == 404


async def test_openais_client_polls(pair: Pair) -> None:
    async with openai.AsyncOpenAI(base_url=f"{pair.b.url}/v1", api_key="none", max_retries=0) as client:
        response = await client.responses.create(
            model="talking", input="hi", background=True, max_output_tokens=20, extra_body={"ignore_eos": True}
        )
        asked = response.id
        response = await eventually(
            lambda: client.responses.retrieve(asked), lambda found: found.status not in ("queued", "in_progress")
        )
    assert (response.status, bool(response.output_text)) == ("incomplete", True)
