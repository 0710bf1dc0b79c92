"""Tests of gpt-oss's messages over HTTP, with and without tools."""

from __future__ import annotations

import pathlib

import pytest

from tests.services.frontend.tool_model import ASK, WEATHER, tool_model_folder, tool_server

ANSWER = (
    "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    '<|start|>assistant to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{"city": "Oslo"}'
)
PARSERS = {"tool_call_parser": "openai", "reasoning_parser": "openai_gptoss"}


@pytest.mark.parametrize("reasoning", ["openai_gptoss", "none"])
async def test_calls_reasoning_and_text_are_separated(tmp_path: pathlib.Path, reasoning: str) -> None:
    settings = {**PARSERS, "reasoning_parser": reasoning}
    async with tool_server(tool_model_folder(tmp_path / "m"), ANSWER, **settings) as (_, client, _script):
        answer = await client.chat.completions.create(model="m", messages=ASK, tools=[WEATHER])
        message = answer.choices[0].message
        assert (message.content, message.reasoning) == ("I look.", "Hm.")
        assert [(call.function.name, call.function.arguments) for call in message.tool_calls] == [
            ("get_weather", '{"city": "Oslo"}')
        ]
        assert answer.choices[0].finish_reason == "tool_calls"


async def test_a_call_without_tools_on_offer_is_text(tmp_path: pathlib.Path) -> None:
    async with tool_server(tool_model_folder(tmp_path / "m"), ANSWER, **PARSERS) as (_, client, _script):
        answer = await client.chat.completions.create(model="m", messages=ASK)
        message = answer.choices[0].message
        assert (message.content, message.reasoning) == ('I look.\n{"city": "Oslo"}', "Hm.")
        assert not message.tool_calls
