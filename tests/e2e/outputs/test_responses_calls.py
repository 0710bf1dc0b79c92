"""Required function calls of responses: the grammar binds quire-tiny to functions that it has never seen."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from quire.cluster import Cluster

UNIT = {"type": "string", "enum": ["celsius", "fahrenheit"]}
OPTIONS = {
    "type": "object",
    "properties": {"unit": UNIT, "hourly": {"type": "boolean"}},
    "required": ["unit"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "options": {"$ref": "#/$defs/Options"},
    },
    "required": ["city", "days", "options"],
    "additionalProperties": False,
    "$defs": {"Options": OPTIONS},
}
TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": name, "description": text, "parameters": PLACE}
    for name, text in (("current_weather", "The weather now."), ("forecast", "The weather to come."))
]
TOOLS.append({"type": "function", "name": "now", "parameters": {}})
CHOICES: Any = ("required", {"type": "function", "name": "forecast"}, {"type": "function", "name": "now"})
OPENED = {
    "response.completed": "response.created",
    "response.incomplete": "response.created",
    "response.output_item.done": "response.output_item.added",
    "response.content_part.done": "response.content_part.added",
    "response.output_text.done": "response.output_text.delta",
    "response.function_call_arguments.done": "response.function_call_arguments.delta",
}


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def asked(**more: Any) -> Any:
    said = "Tell me the weather in Berlin, and that of the next five days, in fahrenheit."
    return {"model": "quire-tiny", "input": said, "tools": TOOLS, "max_output_tokens": 400, "temperature": 0} | more


def check(item: Any, choice: Any) -> None:
    """Checks that the call is for a requested function, with arguments of its schema."""
    assert (item.type, item.status) == ("function_call", "completed")
    assert item.name == (choice["name"] if choice != "required" else item.name)
    values = json.loads(item.arguments)
    if item.name == "now":
        assert values == {}
        return
    assert set(values) == {"city", "days", "options"}
    assert 1 <= values["days"] <= 7
    assert values["options"]["unit"] in UNIT["enum"]


@pytest.mark.parametrize("choice", CHOICES, ids=["required", "forecast", "now"])
def test_call_is_returned_whole_and_streamed(http: openai.OpenAI, choice: Any) -> None:
    more = {"tool_choice": choice, "parallel_tool_calls": False}
    reply = http.responses.create(**asked(**more))
    (item,) = reply.output
    check(item, choice)
    assert reply.status == "completed"
    with http.responses.stream(**asked(**more)) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert [(i.name, i.arguments) for i in final.output] == [(item.name, item.arguments)]
    pieces = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item.arguments


@pytest.mark.parametrize(("choice", "limit"), [("required", 400), ("auto", 400), ("required", 60), ("required", 4)])
def test_every_opened_event_is_closed_before_the_response(http: openai.OpenAI, choice: str, limit: int) -> None:
    """Also where the answer is truncated: within the arguments, and before the name."""
    stream = http.responses.create(**asked(tool_choice=choice, max_output_tokens=limit, stream=True))
    opened: list[str] = []
    kinds = []
    for event in stream:
        kinds.append(event.type)
        is_new_delta = event.type.endswith(".delta") and opened[-1] != event.type
        if event.type == "response.created" or event.type.endswith(".added") or is_new_delta:
            opened.append(event.type)
        elif event.type in OPENED:
            assert opened.pop() == OPENED[event.type]
    assert opened == []
    response = event.response
    is_cut = response.usage.output_tokens == limit
    assert kinds[-1] == ("response.incomplete" if is_cut else "response.completed")
    assert response.status == ("incomplete" if is_cut else "completed")
    assert (response.incomplete_details is not None) == is_cut
    assert (response.output == []) == (limit == 4), "no function has been named within four tokens"


def test_strict_arguments_go_back_with_their_result(http: openai.OpenAI) -> None:
    tools = [{**tool, "strict": True} for tool in TOOLS[:1]]
    first = http.responses.create(**asked(tools=tools, tool_choice="required", parallel_tool_calls=False))
    (call,) = first.output
    check(call, "required")
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    said = [{"role": "user", "content": "How is the weather?"}, call, result]
    second = http.responses.create(**asked(input=said, tools=tools, tool_choice="none", max_output_tokens=20))
    assert [item.type for item in second.output] == ["message"]
    assert second.output_text
