"""Tests of the items and events of /v1/responses in the cases of vLLM's tests of the parsable context and of
Harmony."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import CALL, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server

TOOLS = [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]
THOUGHT = f"<think>\nMalmö.\n</think>\n\n{CALLS}"
SERVER_TOOLS: list[dict[str, Any]] = [
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "web_search_preview"},
    {"type": "mcp", "server_label": "code_interpreter"},
]
CLOSES = {
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def responses(folder: Path, reply_text: str, *bodies: dict[str, Any]) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the answers to the bodies, and the prompts that the model got."""
    asked = {"model": "talking", "input": "How is the weather?"}
    async with tool_server(folder, reply_text) as (frontend, _, script):
        replies = [await frontend.http.post("/v1/responses", json={**asked, **body}) for body in bodies]
        prompts = [prompt_text(folder, prompt_of(submission)) for submission in script.submissions]
    return [reply.json() if "data: " not in reply.text else events_of(reply.text) for reply in replies], prompts


def events_of(stream: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in stream.splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize(
    ("reply_text", "more", "kinds"),
    [
        ("It is sunny.", {}, ["message"]),
        ("", {}, []),
        ("<think>\nHm.\n</think>", {}, ["reasoning"]),
        ("<think>\nHm.\n</think>\n\nIt is sunny.", {}, ["reasoning", "message"]),
        (CALL, {"tools": TOOLS}, ["function_call"]),
        (CALL, {"tools": TOOLS, "tool_choice": "required"}, ["function_call"]),
    ],
)
async def test_an_answer_has_the_items_that_the_model_wrote(
    tool_model: Path, reply_text: str, more: dict[str, Any], kinds: list[str]
) -> None:
    ((whole, streamed), _) = await responses(tool_model, reply_text, more, {**more, "stream": True})
    for response in (whole, streamed[-1]["response"]):
        assert response["status"] == "completed"
        assert [item["type"] for item in response["output"] if item["type"] != "message" or item["content"]] == kinds
        assert all(item["status"] == "completed" for item in response["output"])
        thought = response["usage"]["output_tokens_details"]["reasoning_tokens"]
        assert (thought > 0) == ("reasoning" in kinds)


async def test_events_nest(tool_model: Path) -> None:
    """Checks that parts are done before the item that contains them, and that each delta belongs to the open item."""
    ((events,), _) = await responses(tool_model, THOUGHT, {"tools": TOOLS, "stream": True})
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    open_now: list[tuple[str, Any]] = []
    seen: list[str] = []
    for event in events[2:-1]:
        kind = event["type"]
        item_id = event["item"]["id"] if "item" in event else event["item_id"]
        if kind in CLOSES.values():
            open_now.append((kind, item_id))
            seen += [item_id] if kind == "response.output_item.added" else []
        elif kind in CLOSES:
            assert open_now.pop() == (CLOSES[kind], item_id)
        assert all(of == item_id for _, of in open_now)
        assert event["output_index"] == len(seen) - 1
    assert open_now == []
    assert seen == [item["id"] for item in events[-1]["response"]["output"]]
    for prefix in ("response.output_text", "response.reasoning_text", "response.function_call_arguments"):
        texts: dict[str, str] = {}
        for event in events:
            if event["type"] == f"{prefix}.delta":
                texts[event["item_id"]] = texts.get(event["item_id"], "") + event["delta"]
        done = {e["item_id"]: e.get("text", e.get("arguments")) for e in events if e["type"] == f"{prefix}.done"}
        assert done == texts != {}


async def test_a_call_that_is_cut_off_is_incomplete(tool_model: Path) -> None:
    body = {"tools": TOOLS, "max_output_tokens": 40}
    ((whole, streamed), _) = await responses(tool_model, CALL, body, {**body, "stream": True})
    last = streamed[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        (call,) = response["output"]
        assert (call["type"], call["status"]) == ("function_call", "incomplete")
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


@pytest.mark.parametrize("tool", SERVER_TOOLS, ids=lambda tool: tool["type"])
async def test_tools_that_a_server_runs_change_nothing_and_make_no_events(
    tool_model: Path, tool: dict[str, Any]
) -> None:
    with_functions = {"tools": [tool, *TOOLS], "stream": True}
    ((alone, events, none), prompts) = await responses(tool_model, CALL, {"tools": [tool]}, with_functions, {})
    assert alone["status"] == "completed"
    assert prompts[0] == prompts[2]
    assert alone["output"][0]["content"] == none["output"][0]["content"]
    assert [event["item"]["type"] for event in events if event["type"] == "response.output_item.done"] == [
        "function_call"
    ]
    assert not any(tool["type"] in event["type"] for event in events)


async def test_parts_of_a_message_may_be_called_text(tool_model: Path) -> None:
    parts = [{"type": "text", "text": "Rule 1."}, {"type": "input_text", "text": "Rule 2."}]
    bodies = [
        {"input": [{"role": role, "content": parts}, {"role": "user", "content": "Go."}]}
        for role in ("developer", "system")
    ]
    (_, prompts) = await responses(tool_model, "ok", *bodies)
    assert prompts[0] == prompts[1]
    assert prompts[0].startswith("<|im_start|>system\nRule 1.\nRule 2.<|im_end|>")


async def test_thoughts_before_an_open_turn_are_accepted(tool_model: Path) -> None:
    """Checks inputs that end with the reasoning of a turn without a message, as in vLLM's tests."""
    thought = {"type": "reasoning", "id": "r", "content": [{"type": "reasoning_text", "text": "Greet."}], "summary": []}
    call = {"type": "function_call", "call_id": "c", "name": "now", "arguments": "{}", "status": "completed"}
    output = {"type": "function_call_output", "call_id": "c", "output": "12:00", "status": "completed"}
    user_message = {"type": "message", "role": "user", "content": "Hello."}
    bodies = [{"input": [user_message, thought]}, {"input": [user_message, thought, call, output], "tools": TOOLS}]
    ((first, second), prompts) = await responses(tool_model, "Noon.", *bodies)
    assert (first["status"], second["status"]) == ("completed", "completed")
    assert "<|im_start|>tool\n12:00<|im_end|>" in prompts[1]


class PlannedEvent(BaseModel):
    """Schema that a client parses from a text."""

    name: str
    participants: list[str]


async def test_openais_client_parses_a_form(tool_model: Path) -> None:
    event = {"name": "fair", "participants": ["Alice", "Bob"]}
    async with tool_server(tool_model, json.dumps(event)) as (_, client, _script):
        reply = await client.responses.parse(model="talking", input="A fair.", text_format=PlannedEvent)
    assert reply.output_parsed == PlannedEvent(**event)


@pytest.mark.parametrize(("reply_text", "max_tokens"), [("one two three four five", 3), (THOUGHT, 40)])
async def test_chat_that_is_cut_off_has_the_text_so_far(tool_model: Path, reply_text: str, max_tokens: int) -> None:
    async with tool_server(tool_model, reply_text) as (_, client, _script):
        reply = await client.chat.completions.create(
            model="talking", messages=[{"role": "user", "content": "x"}], max_tokens=max_tokens
        )
    (choice,) = reply.choices
    assert choice.finish_reason == "length"
    assert choice.message.content


async def test_conversations_in_harmonys_own_form_are_refused(tool_model: Path) -> None:
    """Checks the refusal: otherwise they would be missing from the prompt."""
    name = "previous_input_messages"
    ((refused, nothing), _) = await responses(
        tool_model, "ok", {name: [{"role": "user", "content": "x"}]}, {name: None}
    )
    assert f"{name} is not supported by this server" in refused["error"]["message"]
    assert refused["error"]["param"] == name
    assert nothing["status"] == "completed"
