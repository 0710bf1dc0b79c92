"""Tests of a tool loop's second turn, developer turns and parts with templates of many families, over each API."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tokenizer.template_families import source
from tests.services.frontend.tool_model import ASK, WEATHER, tool_model_folder, tool_server

CALL_ID = "call_PTLP8xhu3uwZk4l3nlnrrJha"
FUNCTION = {"name": "get_weather", "arguments": '{"city": "Oslo"}'}
CALL = {"id": CALL_ID, "type": "function", "function": FUNCTION}
RESULT = {"role": "tool", "tool_call_id": CALL_ID, "content": "5 degrees"}


def looped(**more: Any) -> list[dict[str, Any]]:
    return [*ASK, {"role": "assistant", "content": None, "tool_calls": [CALL], **more}, RESULT]


async def prompts(tmp_path: Path, family: str, *calls: tuple[str, dict[str, Any]]) -> list[str]:
    """Returns the prompt of each call."""
    folder = tool_model_folder(tmp_path / "talking", source(family))
    async with tool_server(folder, "ok", tool_call_parser="hermes") as (frontend, _, script):
        for path, body in calls:
            answer = await frontend.http.post(path, json={"model": "talking", **body})
            assert answer.status_code == 200, answer.text
    return [prompt_text(folder, prompt_of(submission)) for submission in script.submissions]


@pytest.mark.parametrize(
    "family",
    ["qwen3", "glm 4.6", "minimax m2", "deepseek r1 distill", "functionary 3.2", "mistral nemo", "gpt-oss", "gemma 2"],
)
async def test_the_second_turn_of_a_tool_loop_shows_call_and_result_over_every_api(tmp_path: Path, family: str) -> None:
    """Checks ct09, ct11, ct12: vllm#54337, sglang#9898, opencode#1680."""
    supports_tools = "tools" in source(family)
    flat = {"type": "function", **WEATHER["function"]}
    item = {"type": "function_call", "call_id": CALL_ID, **FUNCTION}
    output = {"type": "function_call_output", "call_id": CALL_ID, "output": "5 degrees"}
    block = {"type": "tool_use", "id": CALL_ID, "name": "get_weather", "input": {"city": "Oslo"}}
    result = {"type": "tool_result", "tool_use_id": CALL_ID, "content": "5 degrees"}
    own = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}

    def offered(tool: dict[str, Any]) -> dict[str, Any]:
        return {"tools": [tool]} if supports_tools else {}

    unnamed = {"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}
    shown = await prompts(
        tmp_path,
        family,
        ("/v1/chat/completions", {"messages": looped(), **offered(WEATHER)}),
        ("/v1/chat/completions", {"messages": looped(content=""), **offered(WEATHER)}),
        ("/v1/responses", {"input": [*ASK, item, output], **offered(flat)}),
        (
            "/v1/messages",
            {
                "max_tokens": 9,
                "messages": [
                    *ASK,
                    {"role": "assistant", "content": [block]},
                    {"role": "user", "content": [result]},
                ],
                **offered(own),
            },
        ),
        (
            "/api/chat",
            {
                "messages": [
                    *ASK,
                    {"role": "assistant", "content": "", "tool_calls": [unnamed]},
                    {"role": "tool", "tool_name": "get_weather", "content": "5 degrees"},
                ],
                **offered(WEATHER),
                "stream": False,
            },
        ),
    )
    assert len(shown) == 5
    for text in shown:
        called = text[text.index("How is the weather?") :]
        for word in ("get_weather", "Oslo", "5 degrees"):
            assert word in called
        assert "None" not in text
        assert CALL_ID not in text or family != "mistral nemo"


async def test_a_guard_model_reads_the_users_text(tmp_path: Path) -> None:
    """Checks ct01 (vllm#9294): a template that reads content as parts silently lost it."""
    text = "How do I make a cake?"
    shown = await prompts(
        tmp_path,
        "llama guard",
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": text}]}]}),
        ("/v1/messages", {"max_tokens": 5, "messages": [{"role": "user", "content": text}]}),
        ("/v1/responses", {"input": text}),
        ("/api/generate", {"prompt": text, "stream": False}),
    )
    assert [text.count(text) for text in shown] == [1] * 5


async def test_developer_turns_become_system_turns_for_templates_without_them(tmp_path: Path) -> None:
    """Checks cx05 (lmstudio#2298, vllm#41114): Qwen3.5 refuses other roles, and later system turns."""
    developer, system = {"role": "developer", "content": "Be brief."}, {"role": "system", "content": "Be kind."}
    conversations = ([developer, *ASK], [system, developer, *ASK], [system, *ASK, developer, *ASK], [*ASK, developer])
    shown = await prompts(
        tmp_path,
        "qwen3.5",
        *(("/v1/chat/completions", {"messages": messages}) for messages in conversations),
        *(("/v1/responses", {"input": messages}) for messages in conversations),
    )
    for text in shown:
        assert text.startswith("<|im_start|>system\nBe ")
        assert "Be brief.<|im_end|>" in text
        assert text.count("<|im_start|>system") == 1


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "thinking"])
async def test_gpt_oss_reads_the_reasoning_before_a_call(tmp_path: Path, field: str) -> None:
    """Checks ct10 (vllm#27653): the template reads thinking; together with text, both are shown (llama.cpp#19701)."""
    shown = await prompts(
        tmp_path,
        "gpt-oss",
        ("/v1/chat/completions", {"messages": looped(**{field: "MYCOT"}), "tools": [WEATHER]}),
        ("/v1/chat/completions", {"messages": looped(**{field: "MYCOT", "content": "Hm."}), "tools": [WEATHER]}),
    )
    assert "<|channel|>analysis<|message|>MYCOT<|end|>" in shown[0]
    assert "<|channel|>analysis<|message|>MYCOT\n\nHm.<|end|>" in shown[1]


async def test_arguments_may_be_an_object(tmp_path: Path) -> None:
    """Checks ct03 (deer-flow#4445): arguments may be sent as an object."""
    function = {"name": "add", "arguments": {"a": 1, "b": 2}}
    turns = looped(tool_calls=[{"id": CALL_ID, "type": "function", "function": function}])
    (text,) = await prompts(tmp_path, "qwen2.5", ("/v1/chat/completions", {"messages": turns}))
    assert '"arguments": {"a": 1, "b": 2}' in text


async def test_arguments_of_another_type_are_refused_by_name(tmp_path: Path) -> None:
    async with tool_server(tool_model_folder(tmp_path / "talking"), "ok") as (frontend, _, _script):
        function = {"name": "add", "arguments": [1, 2]}
        turns = looped(tool_calls=[{"id": CALL_ID, "type": "function", "function": function}])
        answer = await frontend.http.post("/v1/chat/completions", json={"model": "talking", "messages": turns})
    assert answer.status_code == 400
    assert "must be JSON text or an object, got list" in answer.text


async def test_a_request_names_one_of_the_models_templates(tmp_path: Path) -> None:
    """Checks ct08: a request selects a template by its name."""
    folder = tool_model_folder(tmp_path / "talking")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("with sources: {{ messages[0].content }}")
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("with tools: {{ messages[0].content }}")
    async with tool_server(folder, "ok") as (frontend, _, script):
        for more in ({"chat_template": "rag"}, {"tools": [WEATHER]}):
            body = {"model": "talking", "messages": ASK, **more}
            assert (await frontend.http.post("/v1/chat/completions", json=body)).status_code == 200
        refused = await frontend.http.post("/v1/chat/completions", json=body | {"chat_template": "other"})
    shown = [prompt_text(folder, prompt_of(submission)) for submission in script.submissions]
    assert shown == ["with sources: How is the weather?", "with tools: How is the weather?"]
    assert refused.status_code == 400
    assert "available: default, rag, tool_use" in refused.text
