"""Tool calls of quire-tiny, end to end: offered, called, answered, worded."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import openai
import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams
from quire.shared.errors import InvalidArgument
from tools.evals import check, held_back_items
from tools.evals.item import Item
from tools.evals.tools import spell_call

ITEMS = held_back_items(4, ["tools"])


@pytest.fixture
def http(cluster: Cluster) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0)


def turns(item: Item) -> list[Any]:
    """Conversation turns with arguments as text, as clients send them."""
    written: list[Any] = json.loads(json.dumps(item.messages))
    for message in written:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return written


def spoken(message: Any) -> str:
    calls = [
        spell_call({"name": c.function.name, "arguments": json.loads(c.function.arguments)})
        for c in message.tool_calls or ()
    ]
    return (message.content or "") + "".join(calls)


@pytest.mark.parametrize("item", ITEMS, ids=[f"{item.size}-{i}" for i, item in enumerate(ITEMS)])
def test_known_answers(http: openai.OpenAI, item: Item) -> None:
    reply = http.chat.completions.create(
        model="quire-tiny", messages=turns(item), tools=list(item.tools), temperature=0, max_tokens=item.max_tokens
    )
    assert check(item, spoken(reply.choices[0].message)).right
    assert reply.choices[0].finish_reason == ("stop" if item.size == "reply" else "tool_calls")


def test_a_conversation_with_a_call_in_it(http: openai.OpenAI) -> None:
    """A streamed call, its result sent back, the answer in words."""
    item = next(item for item in ITEMS if item.size == "reply")
    question: Any = list(item.messages[:1])
    tools: Any = list(item.tools)
    name, call_id, arguments = "", "", ""
    for chunk in http.chat.completions.create(
        model="quire-tiny", messages=question, tools=tools, temperature=0, max_tokens=128, stream=True
    ):
        for piece in chunk.choices[0].delta.tool_calls or ():
            name, call_id = name or piece.function.name, call_id or piece.id
            arguments += piece.function.arguments
    called = item.messages[1]["tool_calls"][0]["function"]
    assert (name, json.loads(arguments)) == (called["name"], called["arguments"])
    function = {"name": name, "arguments": arguments}
    question += [
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": item.messages[2]["content"]},
    ]
    reply = http.chat.completions.create(
        model="quire-tiny", messages=question, tools=tools, extra_body={"temperature": 0}
    )
    assert reply.choices[0].message.content == item.expected


def test_the_python_face_calls_tools(client: Client) -> None:
    item = next(item for item in ITEMS if item.size == "reply")
    greedy = SamplingParams(temperature=0, max_tokens=128)
    question: list[Any] = list(item.messages[:1])
    sample = client.chat(question, greedy, tools=item.tools)[0].outputs[0]
    called = item.messages[1]["tool_calls"][0]["function"]
    assert [(call.name, json.loads(call.arguments)) for call in sample.tool_calls] == [
        (called["name"], called["arguments"])
    ]
    deltas = list(client.stream_chat(question, greedy, tools=item.tools))
    assert "".join(call.arguments for delta in deltas for call in delta.tool_calls) == sample.tool_calls[0].arguments
    call = sample.tool_calls[0]
    question += [
        {"role": "assistant", "content": sample.text, "tool_calls": [call.as_message()]},
        {"role": "tool", "tool_call_id": call.id, "content": item.messages[2]["content"]},
    ]
    assert client.chat(question, greedy, tools=item.tools)[0].text == item.expected
    with pytest.raises(InvalidArgument, match="unknown argument 'tool'"):
        client.chat(question, greedy, tool=item.tools)  # type: ignore[call-arg]


@pytest.mark.parametrize("stream", [False, True])
def test_required_calls_are_made_for_any_question(http: openai.OpenAI, stream: bool) -> None:
    """The weather is the only tool, and the question is unrelated."""
    weather = {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string", "maxLength": 20}, "day": {"enum": ["Monday", "Sunday"]}},
                "required": ["city", "day"],
                "additionalProperties": False,
            },
        },
    }
    question: Any = [{"role": "user", "content": "What is 23 + 45?"}]
    for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
        asked: Any = {"model": "quire-tiny", "messages": question, "tools": [weather], "tool_choice": choice}
        asked |= {"temperature": 0, "max_tokens": 300, "parallel_tool_calls": False}
        if stream:
            pieces = [
                piece
                for chunk in http.chat.completions.create(**asked, stream=True)
                for piece in chunk.choices[0].delta.tool_calls or ()
            ]
            name, arguments = pieces[0].function.name, "".join(piece.function.arguments or "" for piece in pieces)
        else:
            reply = http.chat.completions.create(**asked)
            (call,) = reply.choices[0].message.tool_calls
            name, arguments = call.function.name, call.function.arguments
        values = json.loads(arguments)
        assert name == "get_weather"
        assert set(values) == {"city", "day"}
        assert values["day"] in ("Monday", "Sunday")


def test_anthropics_client_calls_tools(cluster: Cluster) -> None:
    item = next(item for item in ITEMS if item.size == "reply")
    called = item.messages[1]["tool_calls"][0]["function"]
    functions = [tool["function"] for tool in item.tools]
    tools: Any = [
        {"name": f["name"], "description": f["description"], "input_schema": f["parameters"]} for f in functions
    ]
    turns: Any = [{"role": "user", "content": item.messages[0]["content"]}]
    client = anthropic.Anthropic(base_url=f"http://{cluster.http_address}", api_key="none", max_retries=0)
    with client.messages.stream(
        model="quire-tiny", max_tokens=128, messages=turns, tools=tools, extra_body={"temperature": 0}
    ) as stream:
        reply = stream.get_final_message()
    (call,) = reply.content
    assert call.type == "tool_use"
    assert (call.name, call.input, reply.stop_reason) == (called["name"], called["arguments"], "tool_use")
    result = {"type": "tool_result", "tool_use_id": call.id, "content": item.messages[2]["content"]}
    turns += [
        {"role": "assistant", "content": [call.model_dump(include={"type", "id", "name", "input"})]},
        {"role": "user", "content": [result]},
    ]
    reply = client.messages.create(
        model="quire-tiny", max_tokens=64, messages=turns, tools=tools, extra_body={"temperature": 0}
    )
    assert [block.text for block in reply.content if block.type == "text"] == [item.expected]
    client.close()


def test_responses_call_tools(http: openai.OpenAI) -> None:
    item = next(item for item in ITEMS if item.size == "reply")
    called = item.messages[1]["tool_calls"][0]["function"]
    tools: Any = [{"type": "function", **tool["function"]} for tool in item.tools]
    asked: Any = {"model": "quire-tiny", "tools": tools, "temperature": 0, "max_output_tokens": 128}
    first = http.responses.create(input=item.messages[0]["content"], **asked)
    (call,) = first.output
    assert call.type == "function_call"
    assert (call.name, json.loads(call.arguments)) == (called["name"], called["arguments"])
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": item.messages[2]["content"]}
    with http.responses.stream(input=[result], previous_response_id=first.id, **asked) as stream:
        assert stream.get_final_response().output_text == item.expected


def strict(tools: Any, towns: list[str]) -> Any:
    """Schema in which every text is one of the given values."""
    offered: Any = json.loads(json.dumps(tools))
    for tool in offered:
        tool["function"]["strict"] = True
        for document in tool["function"]["parameters"]["properties"].values():
            if document["type"] == "string":
                document["enum"] = towns
    return offered


def test_strict_tools_bind_calls_and_leave_the_choice(http: openai.OpenAI) -> None:
    """The model would use the requested town; the schema allows two others only."""
    item = next(item for item in ITEMS if any(t["function"]["name"] == "get_weather" for t in item.tools))
    asked: Any = {"model": "quire-tiny", "temperature": 0, "max_tokens": 128}
    reply = http.chat.completions.create(
        messages=list(item.messages[:1]), tools=strict(item.tools, ["Xanten", "Ystad"]), **asked
    )
    (call,) = reply.choices[0].message.tool_calls
    texts = [value for value in json.loads(call.function.arguments).values() if isinstance(value, str)]
    assert texts
    assert set(texts) <= {"Xanten", "Ystad"}
    item = next(item for item in ITEMS if item.size == "reply")
    function = item.messages[1]["tool_calls"][0]["function"]
    towns = [value for value in function["arguments"].values() if isinstance(value, str)]
    answer = http.chat.completions.create(messages=turns(item), tools=strict(item.tools, towns or ["x"]), **asked)
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].message.content
