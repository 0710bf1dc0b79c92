"""Streams send headers and keep-alives before their first token (vllm#47647, litellm#34374)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

SAID = [{"role": "user", "content": "hi"}]
PATHS: dict[str, tuple[dict[str, Any], bytes]] = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 3}, b": keep-alive\n\n"),
    "/v1/chat/completions": ({"messages": SAID, "max_tokens": 3}, b": keep-alive\n\n"),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 3}, b": keep-alive\n\n"),
    "/v1/messages": ({"messages": SAID, "max_tokens": 3}, b'event: ping\ndata: {"type":"ping"}\n\n'),
    "/api/chat": ({"messages": SAID, "options": {"num_predict": 3}}, b'"done":false}\n'),
}


@pytest.mark.parametrize("path", PATHS)
async def test_a_stream_without_a_token_opens_and_is_kept_alive(tmp_path: Path, path: str) -> None:
    """The model sends nothing until the client has received the headers and a keep-alive."""
    body, kept_alive = PATHS[path]
    script = ScriptedScheduler(count_up)
    script.pause()
    folder = tool_model_folder(tmp_path / "talking")
    async with scheduler(script), running(folder, script.address, sse_keepalive_s=0.05) as frontend:
        sent = {"model": "talking", "stream": True, **body}
        async with frontend.http.stream("POST", path, json=sent) as answer:
            assert answer.status_code == 200
            pieces = answer.aiter_bytes()
            assert (await anext(pieces)).endswith(kept_alive)
            script.resume()
            rest = b"".join([piece async for piece in pieces])
    assert b'"error":{' not in rest
    assert rest


async def test_an_invalid_request_still_has_its_own_status(tmp_path: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    folder = tool_model_folder(tmp_path / "talking")
    async with scheduler(script), running(folder, script.address, sse_keepalive_s=0.05) as frontend:
        wrong = {"model": "talking", "messages": SAID, "stream": True, "temperature": -1}
        assert (await frontend.http.post("/v1/chat/completions", json=wrong)).status_code == 400


async def test_a_failure_after_the_headers_is_an_event(tmp_path: Path) -> None:
    script = ScriptedScheduler(count_up)
    script.pause()
    folder = tool_model_folder(tmp_path / "talking")
    async with scheduler(script), running(folder, script.address, sse_keepalive_s=0.05) as frontend:
        sent = {"model": "talking", "messages": SAID, "stream": True}
        answer = await frontend.http.post("/v1/chat/completions", json=sent, headers={"x-request-timeout": "2"})
    assert answer.status_code == 200
    events = [event for event in answer.text.split("\n\n") if event.startswith("data: ")]
    assert "error" in json.loads(events[0].removeprefix("data: "))
    assert events[-1] == "data: [DONE]"
