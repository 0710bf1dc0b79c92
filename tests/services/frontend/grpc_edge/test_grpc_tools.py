"""Tools and reasoning over the Chat method."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from quire.shared.pb.common.v1.sampling_pb2 import SamplingParams
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import CALLS, WEATHER, tool_model_folder, tool_server

FUNCTION = WEATHER["function"]
TOOLS = (
    pb.Tool(name=FUNCTION["name"], description=FUNCTION["description"], parameters=json.dumps(FUNCTION["parameters"])),
    pb.Tool(name="now"),
)


@pytest.fixture(scope="module")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


def chat(**fields: Any) -> pb.ChatRequest:
    return pb.ChatRequest(**{"messages": [pb.ChatMessage(role="user", content="Weather?")], "tools": TOOLS} | fields)


def joined(messages: Sequence[pb.ChatResponse]) -> tuple[str, str, list[list[str]]]:
    """Returns reasoning, content and tool calls of all messages."""
    calls: list[list[str]] = []
    for piece in (piece for message in messages for piece in message.tool_calls):
        if piece.id:
            assert piece.index == len(calls)
            calls.append([piece.name, ""])
        calls[piece.index][1] += piece.arguments
    return "".join(m.reasoning for m in messages), "".join(m.content for m in messages), calls


async def test_calls_and_reasoning_in_pieces_and_in_one(tools_folder: Path) -> None:
    async with tool_server(tools_folder, f"<think>Hm.</think>{CALLS}") as (frontend, _, script):
        pieces = [message async for message in frontend.inference.Chat(chat())]
        whole = [m async for m in frontend.inference.Chat(chat(options=pb.RequestOptions(final_only=True)))]
        silent = [m async for m in frontend.inference.Chat(chat(include_reasoning=False, parallel_tool_calls=False))]
    expected = [["get_weather", '{"city": "Malmö 🙂"}'], ["now", "{}"]]
    assert joined(pieces) == ("Hm.", "Let me see.", expected)
    assert joined(whole) == joined(pieces)
    assert len(whole) == 1
    assert joined(silent) == ("", "Let me see.", expected[:1])
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt_text(tools_folder, prompt_of(script.submissions[0]))
    assert sum(len(m.token_ids) for m in pieces) == pieces[-1].usage.completion_tokens
    assert 0 < pieces[-1].usage.reasoning_tokens == whole[-1].usage.reasoning_tokens < len(whole[-1].token_ids)


async def test_the_template_gets_calls_results_and_variables(tools_folder: Path) -> None:
    turns = [
        pb.ChatMessage(role="user", content="Weather?"),
        pb.ChatMessage(role="assistant", tool_calls=[pb.ToolCall(id="c", name="now", arguments='{"x": 1}')]),
        pb.ChatMessage(role="tool", content="12:00", tool_call_id="c"),
    ]
    async with tool_server(tools_folder, "x") as (frontend, _, script):
        async for _ in frontend.inference.Chat(chat(messages=turns, reasoning_effort="low")):
            pass
        conversation = pb.Conversation(messages=turns, tools=TOOLS)
        counted = await frontend.inference.Tokenize(pb.TokenizeRequest(conversation=conversation))
        async for _ in frontend.inference.Chat(chat(tool_choice=pb.ToolChoice(mode=pb.ToolChoice.MODE_NONE))):
            pass
    prompt, without = (prompt_text(tools_folder, prompt_of(s)) for s in script.submissions)
    assert '<tool_call>{"name": "now", "arguments": {"x": 1}}</tool_call>' in prompt
    assert prompt.endswith("<think>\n")
    assert prompt_text(tools_folder, list(counted.token_ids)) == prompt.removesuffix("<think>\n")
    assert "get_weather" not in without


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"tools": [pb.Tool(name="")]}, "tools", "tools[0]: name must be a text that is not empty"),
        ({"tools": [pb.Tool(name="f", parameters="{")]}, "tools", "tools is not JSON"),
        ({"tools": [pb.Tool(name="f", parameters="[1]")]}, "tools", "parameters must be a JSON Schema object"),
        (
            {"tools": [], "tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED)},
            "tool_choice",
            "when it is used, tools must be set",
        ),
        ({"tool_choice": pb.ToolChoice(name="now")}, "tool_choice", "a name requires MODE_REQUIRED"),
        (
            {"tool_choice": pb.ToolChoice(mode=pb.ToolChoice.MODE_REQUIRED, name="fly")},
            "tool_choice",
            "'fly' is not the name of one of the tools",
        ),
        ({"reasoning_effort": "much"}, "reasoning_effort", "got 'much'"),
    ],
)
async def test_refusals(tools_folder: Path, fields: dict[str, Any], field: str, text: str) -> None:
    async with tool_server(tools_folder, "x") as (frontend, _, _script):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await frontend.inference.Chat(chat(**fields)).read()
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert text in (refused.value.details() or "")
    assert field in (refused.value.details() or "")


async def test_stop_strings_count_in_the_content_only(tools_folder: Path) -> None:
    request = chat(sampling=SamplingParams(stop=["Hm", '"', "see"]))
    async with tool_server(tools_folder, f"<think>Hm.</think>{CALLS}") as (frontend, _, _script):
        messages = [message async for message in frontend.inference.Chat(request)]
    assert joined(messages) == ("Hm.", "Let me ", [])
    assert messages[-1].stop_string == "see"
