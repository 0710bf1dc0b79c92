"""Unknown fields of messages, tools, parts and options inside a body: ignored and counted, or misspelt and refused."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.http.fields.nested_fields import Shape, check_objects
from quire.services.frontend.http.fields.unknown_fields import MAX_NAMES, OTHER, UnknownFields
from quire.shared.errors import InvalidArgument
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

USER: dict[str, Any] = {"role": "user", "content": "hi"}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {}}
FUNCTION: dict[str, Any] = {"name": "now", "parameters": SCHEMA}
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
FEW: dict[str, dict[str, Any]] = {
    CHAT: {"max_tokens": 3},
    RESPONSES: {"max_output_tokens": 3},
    MESSAGES: {"max_tokens": 3},
    OLLAMA: {"stream": False, "options": {"num_predict": 3}},
}


def said(**more: Any) -> dict[str, Any]:
    return {"messages": [{**USER, **more}]}


def tool(**more: Any) -> dict[str, Any]:
    return {"messages": [USER], "tools": [{"type": "function", "function": {**FUNCTION, **more}}]}


# A path, a body with an unknown field inside, and the label under which the field is counted.
HARMLESS: list[tuple[str, dict[str, Any], str]] = [
    # litellm replays what it was answered, OpenRouter's and Gemini's clients what their API adds
    (CHAT, said(provider_specific_fields={"refusal": None}), "provider_specific_fields"),
    (CHAT, said(reasoning_details=[{"type": "reasoning.text"}]), "reasoning_details"),
    (CHAT, said(timestamp=1760000000), "timestamp"),
    (CHAT, said(id=1947269257, opts={"visible": False}), "id"),  # CodeCompanion, vllm#10463
    (CHAT, said(content=[{"type": "text", "text": "hi", "providerOptions": {}}]), OTHER),
    (CHAT, tool(returns={"type": "string"}), OTHER),
    (CHAT, {"messages": [USER], "stream": True, "stream_options": {"include_usage": True, "acme": 1}}, OTHER),
    (CHAT, {"messages": [USER], "response_format": {"type": "text", "acme": 1}}, OTHER),
    (
        CHAT,
        {
            "messages": [USER],
            "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "acme": 1}},
        },
        OTHER,
    ),
    (CHAT, {"messages": [USER], "thinking": {"type": "enabled", "keep": "all"}}, OTHER),
    (RESPONSES, {"input": [{**USER, "acme": 1}]}, OTHER),
    (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a", "acme": 1}]}]}, OTHER),
    (RESPONSES, {"input": "hi", "reasoning": {"effort": "low", "context": "auto"}}, OTHER),
    (RESPONSES, {"input": "hi", "text": {"verbosity": "low", "acme": 1}}, OTHER),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "text", "acme": 1}}}, OTHER),
    (RESPONSES, {"input": "hi", "tools": [{"type": "function", **FUNCTION, "acme": 1}]}, OTHER),
    # clients that send back the whole message that they were answered with
    (MESSAGES, {"messages": [{**USER, "id": "msg_1", "usage": {"input_tokens": 3}}]}, "usage"),
    (MESSAGES, said(content=[{"type": "text", "text": "hi", "acme": 1}]), OTHER),
    (MESSAGES, {"messages": [USER], "tools": [{"name": "now", "input_schema": SCHEMA, "acme": 1}]}, OTHER),
    (MESSAGES, {"messages": [USER], "thinking": {"type": "disabled", "acme": 1}}, OTHER),
    (MESSAGES, {"messages": [USER], "output_config": {"effort": "low", "acme": 1}}, OTHER),
    (OLLAMA, said(timestamp=1760000000), "timestamp"),
    (OLLAMA, tool(acme=1), OTHER),
]
# A path, a body with a misspelt field inside, the field and what was meant.
MISSPELT: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents", "messages[0].content"),
    (CHAT, {"messages": [USER, {**USER, "toolCallId": "a"}]}, "messages[1].toolCallId", "messages[1].tool_call_id"),
    (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "text", "txt": "hi"}]}]},
        "messages[0].content[0].txt",
        "messages[0].content[0].text",
    ),
    (CHAT, tool(parameter=SCHEMA), "tools[0].function.parameter", "tools[0].function.parameters"),
    # of clients that pass on what an MCP server has listed
    (
        CHAT,
        {"messages": [USER], "tools": [{"type": "function", "function": {"name": "now", "inputSchema": SCHEMA}}]},
        "tools[0].function.inputSchema",
        "tools[0].function.parameters",
    ),
    (
        MESSAGES,
        {"messages": [USER], "tools": [{"name": "now", "parameters": SCHEMA}]},
        "tools[0].parameters",
        "tools[0].input_schema",
    ),
    (
        CHAT,
        {"messages": [USER], "response_format": {"type": "json_object", "json_shema": {}}},
        "response_format.json_shema",
        "response_format.json_schema",
    ),
    (
        CHAT,
        {"messages": [USER], "thinking": {"type": "enabled", "budgetTokens": 5}},
        "thinking.budgetTokens",
        "thinking.budget_tokens",
    ),
    (RESPONSES, {"input": "hi", "reasoning": {"efort": "low"}}, "reasoning.efort", "reasoning.effort"),
    (RESPONSES, {"input": "hi", "text": {"format": {"type": "json_schema", "shema": SCHEMA}}}, "text.format.shema", ""),
    (RESPONSES, {"input": [{**USER, "callId": "a"}]}, "input[0].callId", "input[0].call_id"),
    (MESSAGES, {"messages": [{"role": "user", "contnt": "x", "content": "y"}]}, "messages[0].contnt", ""),
    (
        MESSAGES,
        said(content=[{"type": "tool_result", "tool_use_id": "a", "isError": True}]),
        "messages[0].content[0].isError",
        "messages[0].content[0].is_error",
    ),
    (
        MESSAGES,
        {"messages": [USER], "tools": [{"name": "a"}], "tool_choice": {"type": "auto", "disable_parallel_tools": True}},
        "tool_choice.disable_parallel_tools",
        "tool_choice.disable_parallel_tool_use",
    ),
    (OLLAMA, said(tool_call=[]), "messages[0].tool_call", "messages[0].tool_calls"),
]  # fmt: skip


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


async def test_an_unknown_field_inside_is_ignored_and_counted(frontend: Running) -> None:
    for path, body, label in HARMLESS:
        name = f"quire_unknown_request_fields_total{{field={label}}}"
        before = (await frontend.metrics()).get(name, 0)
        answer = await frontend.http.post(path, json={**FEW[path], **body})
        assert answer.status_code == 200, (body, answer.text)
        assert (await frontend.metrics())[name] > before, body


async def test_a_misspelt_field_inside_is_refused_by_its_place(frontend: Running) -> None:
    for path, body, field, meant in MISSPELT:
        answer = await frontend.http.post(path, json={**FEW[path], **body})
        assert answer.status_code == 400, (body, answer.text)
        assert f"Unrecognized request argument supplied: {field}; did you mean" in answer.text, answer.text
        assert meant in answer.text


async def test_a_strict_server_refuses_each_unknown_field_inside(tmp_path: Path) -> None:
    script = ScriptedScheduler(count_up)
    folder = tool_model_folder(tmp_path / "talking")
    async with scheduler(script), running(folder, script.address, strict_request_fields=True) as frontend:
        for path, body, _ in HARMLESS:
            answer = await frontend.http.post(path, json={**FEW[path], **body})
            assert answer.status_code == 400, (body, answer.text)
            assert "Unrecognized request argument supplied: " in answer.text, answer.text


def test_a_name_is_counted_once_for_all_objects_of_a_kind() -> None:
    counted: Counter[str] = Counter()

    def count(label: str) -> None:
        counted[label] += 1

    part = Shape(frozenset({"text"}), opaque=frozenset({"search"}))
    message = Shape(frozenset({"role", "content"}), {"content": part})
    parts = [{"text": "a", "timestamp": 1}, {"type": "search", "txt": 1}]
    messages = [{"role": "user", "content": parts, "timestamp": 1}] * 100
    check_objects(UnknownFields(count), [*messages, "text", None], message, "messages")
    assert counted == Counter({"timestamp": 2})
    check_objects(UnknownFields(count), None, message, "messages")
    with pytest.raises(InvalidArgument, match=r"messages\[100\]\.content\.txt; did you mean"):
        check_objects(UnknownFields(count), [*messages, {"content": {"txt": 1}}], message, "messages")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [{**USER, f"acme_{number}": 1} for number in range(MAX_NAMES + 1)]}),
        (CHAT, tool(**{f"acme_{number}": 1 for number in range(MAX_NAMES + 1)})),
        (CHAT, {"messages": [USER], "stream_options": {f"acme_{number}": 1 for number in range(MAX_NAMES + 1)}}),
        (RESPONSES, {"input": [{**USER, f"acme_{number}": 1} for number in range(MAX_NAMES + 1)]}),
        (MESSAGES, {"messages": [{**USER, f"acme_{number}": 1} for number in range(MAX_NAMES + 1)]}),
    ],
)
async def test_more_names_than_are_looked_at_are_refused(path: str, body: dict[str, Any], tmp_path: Path) -> None:
    """Each is compared with all that are known, on the loop: 5,000 of them took seconds."""
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        answer = await frontend.http.post(path, json={**FEW[path], **body})
    assert answer.status_code == 400, answer.text
    assert f"more than {MAX_NAMES} unknown fields: remove them" in answer.text
