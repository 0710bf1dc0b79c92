"""Tests of answers of every kind against the clients' own types: each required field is present and of the right type.

The clients themselves do not validate answers; openai-agents#1227, vercel/ai#5350 and litellm#8825 are reports of
libraries that do.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pytest
from pydantic import TypeAdapter

from tests.services.frontend.openai_edge.test_custom_tools import APPLY_PATCH
from tests.services.frontend.openai_edge.test_custom_tools import CALL as PATCH_CALL
from tests.services.frontend.tool_model import ASK, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server

CHAT: dict[str, Any] = {"messages": ASK}
TOOLS = {"tools": [WEATHER, CLOCK]}
FLAT = {"tools": [{"type": "function", **tool["function"]} for tool in (WEATHER, CLOCK)]}
SCHEMAS = {"tools": [{"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}]}
THOUGHT = f"<think>\nMalmö.\n</think>\n\n{CALLS}"
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
USAGE = {"stream_options": {"include_usage": True}}
MESSAGES: dict[str, Any] = {"messages": ASK, "max_tokens": 200}
COMPLETION, RESPONSE = openai.types.Completion, openai.types.responses.Response
WHOLE, CHUNK = openai.types.chat.ChatCompletion, openai.types.chat.ChatCompletionChunk
EVENT, SENT = openai.types.responses.ResponseStreamEvent, anthropic.types.RawMessageStreamEvent

KINDS: list[tuple[str, str, dict[str, Any], Any, Any]] = [
    ("/v1/chat/completions", "Yes.", CHAT, WHOLE, CHUNK),
    ("/v1/chat/completions", "", CHAT, WHOLE, CHUNK),
    ("/v1/chat/completions", "Yes.", {**CHAT, "n": 2, **LOGPROBS}, WHOLE, CHUNK),
    ("/v1/chat/completions", "Yes.", {**CHAT, "max_tokens": 2}, WHOLE, CHUNK),
    ("/v1/chat/completions", CALLS, {**CHAT, **TOOLS}, WHOLE, CHUNK),
    ("/v1/chat/completions", THOUGHT, {**CHAT, **TOOLS, **LOGPROBS}, WHOLE, CHUNK),
    ("/v1/completions", "Yes.", {"prompt": "x"}, COMPLETION, COMPLETION),
    ("/v1/completions", "Yes.", {"prompt": ["x", "y"], "n": 2, "logprobs": 2, "echo": False}, COMPLETION, COMPLETION),
    ("/v1/responses", "Yes.", {"input": "hi"}, RESPONSE, EVENT),
    ("/v1/responses", "", {"input": "hi"}, RESPONSE, EVENT),
    ("/v1/responses", "Yes.", {"input": "hi", "max_output_tokens": 2}, RESPONSE, EVENT),
    ("/v1/responses", "Yes.", {"input": "hi", "include": ["message.output_text.logprobs"]}, RESPONSE, EVENT),
    ("/v1/responses", THOUGHT, {"input": "hi", **FLAT}, RESPONSE, EVENT),
    ("/v1/responses", PATCH_CALL, {"input": "hi", "tools": [APPLY_PATCH]}, RESPONSE, EVENT),
    ("/v1/messages", "Yes.", MESSAGES, anthropic.types.Message, SENT),
    ("/v1/messages", "Yes.", {**MESSAGES, "max_tokens": 2}, anthropic.types.Message, SENT),
    ("/v1/messages", THOUGHT, {**MESSAGES, **SCHEMAS}, anthropic.types.Message, SENT),
]


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.mark.parametrize(("path", "reply_text", "body", "whole", "event"), KINDS)
async def test_answers_match_the_clients_types(
    tool_model: Path, path: str, reply_text: str, body: dict[str, Any], whole: Any, event: Any
) -> None:
    """Checks ht10 for whole answers and for each event of a stream."""
    asked = {"model": "talking", **body}
    more = USAGE if path.endswith("completions") else {}
    async with tool_server(tool_model, reply_text) as (frontend, _, _script):
        reply = await frontend.http.post(path, json=asked)
        assert reply.status_code == 200, reply.text
        TypeAdapter(whole).validate_json(reply.text)
        stream = await frontend.http.post(path, json={**asked, **more, "stream": True})
    lines = [line.removeprefix("data: ") for line in stream.text.splitlines() if line.startswith("data: ")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    assert len(events) > 1
    one = TypeAdapter(event)
    for sent in events:
        if sent.get("type") != "ping":  # documented, but part of no type
            one.validate_python(_ended(sent) if path == "/v1/completions" else sent)


def _ended(sent: dict[str, Any]) -> dict[str, Any]:
    """Returns a completion chunk with a finish reason, which the type requires although OpenAI sends null before the
    last."""
    choices = [{**choice, "finish_reason": choice["finish_reason"] or "stop"} for choice in sent["choices"]]
    return {**sent, "choices": choices}
