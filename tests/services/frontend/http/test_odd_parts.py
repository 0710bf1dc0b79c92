"""Invalid values inside of messages, items and blocks are refused with their location."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import pytest_asyncio

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.asyncio(loop_scope="module")

LAST = {"role": "user", "content": "hi"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = tool_model_folder(tmp_path_factory.mktemp("models") / "talking")
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        yield frontend


def bodies() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yields path, body, and the beginning of the expected error."""
    for odd in (5, "a", {"a": 1}, [1], [None], ["a"], [{"text": 5}], [{"text": None}]):
        for name in ("content", "summary"):
            items = [{"type": "reasoning", name: odd}, {"role": "assistant", "content": "so"}, LAST]
            yield "/v1/responses", {"input": items}, "input[0]: "
    for odd in (5, 0.5, True, {"a": 1}, [1], [None], ["a"]):
        blocks = [{"type": "tool_result", "tool_use_id": "a", "content": odd}]
        messages = [{"role": "user", "content": blocks}]
        yield "/v1/messages", {"messages": messages, "max_tokens": 2}, "messages[0].content must be text"
        yield "/v1/messages", {"system": odd, "messages": [LAST], "max_tokens": 2}, "system"
    for block in ({"type": "image", "source": {}}, {"text": "hi"}):
        yield "/v1/messages", {"system": [block], "messages": [LAST], "max_tokens": 2}, "system: blocks of type "
    for kind in ([], {}, [{"type": "text"}], 5, None):
        part = {"type": kind, "text": "hi"}
        yield "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}, "messages: parts of type "
        yield "/v1/responses", {"input": [{"role": "user", "content": [part]}]}, "input[0].content: parts of type "
    for odd in (5, 0.5, True, "a", {"a": 1}):
        messages = [{"role": "assistant", "content": "so", "tool_calls": odd}, LAST]
        yield "/v1/chat/completions", {"messages": messages}, "messages: tool_calls must be a list"
    for path, field in (("/v1/chat/completions", "messages"), ("/v1/responses", "input")):
        for part in ({"type": "x" * 9000}, {"type": [["x" * 9000]]}):
            yield path, {field: [{"role": "user", "content": [part]}]}, field
        yield path, {field: [{"role": "x" * 9000, "content": "hi"}]}, field


@pytest.mark.parametrize(("path", "body", "refusal"), [*bodies()])
async def test_unsupported_parts_are_refused(frontend: Running, path: str, body: dict[str, Any], refusal: str) -> None:
    answer = await frontend.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(refusal)
    assert len(answer.text) < 400


async def test_empty_optional_values_count_as_omitted(frontend: Running) -> None:
    for empty in (None, []):
        items = [{"type": "reasoning", "content": empty, "summary": empty}, LAST]
        calls = [{"role": "assistant", "content": "so", "tool_calls": empty}, LAST]
        result = [{"type": "tool_result", "tool_use_id": "a", "content": empty}]
        for path, body in (
            ("/v1/responses", {"input": items, "max_output_tokens": 2}),
            ("/v1/chat/completions", {"messages": calls, "max_tokens": 2}),
            ("/v1/messages", {"messages": [{"role": "user", "content": result}], "max_tokens": 2}),
        ):
            assert (await frontend.http.post(path, json=body)).status_code == 200
