"""Tests of reasoning over OpenAI's chat completions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, CALL, CLOCK, WEATHER, tool_model_folder, tool_server

OPEN = "<think>\n"


def thinking(prompt: str) -> str:
    """Continues the reasoning that the prompt has messages, or begins it."""
    return f"{'' if prompt.endswith(OPEN) else OPEN}It is Malmö.\n</think>\n\n{CALL}"


@pytest.fixture(scope="module")
def thinking_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "thinking")


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "thinking", "messages": ASK, "tools": [WEATHER, CLOCK], **more}


@pytest.mark.parametrize("variables", [{}, {"enable_thinking": True}])
async def test_reasoning_is_separated(thinking_folder: Path, variables: Mapping[str, Any]) -> None:
    more = {"extra_body": {"chat_template_kwargs": variables}}
    async with tool_server(thinking_folder, thinking) as (_, client, script):
        reply = await client.chat.completions.create(**asked(**more))
        stream = await client.chat.completions.create(**asked(**more), stream=True)
        deltas = [chunk.choices[0].delta async for chunk in stream]
    assert prompt_text(thinking_folder, prompt_of(script.submissions[0])).endswith(OPEN) == bool(variables)
    message = reply.choices[0].message
    assert (message.reasoning, message.reasoning_content, message.content) == ("It is Malmö.", "It is Malmö.", None)
    assert message.tool_calls[0].function.name == "get_weather"
    assert reply.choices[0].finish_reason == "tool_calls"
    assert 3 < reply.usage.completion_tokens_details.reasoning_tokens < reply.usage.completion_tokens
    assert "".join(getattr(delta, "reasoning", None) or "" for delta in deltas) == "It is Malmö."
    assert "".join(delta.content or "" for delta in deltas) == ""


async def test_reasoning_without_tools(thinking_folder: Path) -> None:
    async with tool_server(thinking_folder, "<think>2</think>4") as (_, client, _script):
        reply = await client.chat.completions.create(model="thinking", messages=ASK)
        hidden = await client.chat.completions.create(
            model="thinking", messages=ASK, extra_body={"include_reasoning": False}
        )
    assert (reply.choices[0].message.reasoning, reply.choices[0].message.content) == ("2", "4")
    assert hidden.choices[0].message.content == "4"
    assert not hasattr(hidden.choices[0].message, "reasoning")


async def test_effort_reaches_the_template(thinking_folder: Path) -> None:
    async with tool_server(thinking_folder, "x") as (_, client, script):
        for effort in ("none", "low"):
            await client.chat.completions.create(model="thinking", messages=ASK, reasoning_effort=effort)
        await client.chat.completions.create(
            model="thinking",
            messages=ASK,
            reasoning_effort="high",
            extra_body={"chat_template_kwargs": {"enable_thinking": False}},
        )
    open_ends = [prompt_text(thinking_folder, prompt_of(s)).endswith(OPEN) for s in script.submissions]
    assert open_ends == [False, True, False]


async def test_a_continued_answer_may_begin_within_reasoning(thinking_folder: Path) -> None:
    messages = [*ASK, {"role": "assistant", "content": "<think>It is"}]
    more = {"extra_body": {"continue_final_message": True, "add_generation_prompt": False}}
    async with tool_server(thinking_folder, " so.</think>Yes.") as (_, client, _script):
        reply = await client.chat.completions.create(model="thinking", messages=messages, **more)
    assert (reply.choices[0].message.reasoning, reply.choices[0].message.content) == ("so.", "Yes.")


async def test_a_parser_can_be_switched_off_or_named(thinking_folder: Path) -> None:
    async with tool_server(thinking_folder, "<think>2</think>4", reasoning_parser="none") as (_, client, _script):
        reply = await client.chat.completions.create(
            model="thinking", messages=ASK, extra_body={"skip_special_tokens": False}
        )
    assert reply.choices[0].message.content == "<think>2</think>4"
    async with tool_server(thinking_folder, "[THINK]2[/THINK]4", reasoning_parser="mistral") as (_, client, _script):
        reply = await client.chat.completions.create(model="thinking", messages=ASK)
    assert reply.choices[0].message.reasoning == "2"


async def test_a_call_ends_open_reasoning(thinking_folder: Path) -> None:
    """Checks vllm#39056: a call without a preceding end of reasoning was lost."""
    more = {"extra_body": {"chat_template_kwargs": {"enable_thinking": True}}}
    async with tool_server(thinking_folder, f"It is Malmö.\n{CALL}\n</think>") as (_, client, _script):
        reply = await client.chat.completions.create(**asked(**more))
        without = await client.chat.completions.create(model="thinking", messages=ASK, **more)
    choice = reply.choices[0]
    assert (choice.message.reasoning, choice.message.content) == ("It is Malmö.", None)
    assert [call.function.name for call in choice.message.tool_calls] == ["get_weather"]
    assert choice.finish_reason == "tool_calls"
    assert "get_weather" in without.choices[0].message.reasoning  # no tools are on offer
