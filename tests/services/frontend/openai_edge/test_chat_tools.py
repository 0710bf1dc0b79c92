"""Tests of tools over OpenAI's chat completions with the openai package: whole and streamed, several samples
and turns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, CALL, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server


@pytest.fixture(scope="module")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "talking", "messages": ASK, "tools": [WEATHER, CLOCK], **more}


async def streamed(client: Any, **more: Any) -> tuple[dict[int, dict[str, Any]], list[Any]]:
    """Returns every choice as a client joins it, and the chunks."""
    chunks = [chunk async for chunk in await client.chat.completions.create(**asked(**more), stream=True)]
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message = choices.setdefault(choice.index, {"content": "", "reasoning": "", "calls": [], "end": None})
            message["content"] += choice.delta.content or ""
            message["reasoning"] += getattr(choice.delta, "reasoning", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.id is not None:
                    assert call.index == len(message["calls"])
                    message["calls"].append([call.id, call.function.name, ""])
                message["calls"][call.index][2] += call.function.arguments
            message["end"] = choice.finish_reason or message["end"]
    return choices, chunks


async def test_calls_with_and_without_streaming(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALLS) as (frontend, client, script):
        reply = await client.chat.completions.create(**asked())
        frontend.write_each_token(script)
        parts, chunks = await streamed(client)
        script.tokens_per_step = 7
        wide, _ = await streamed(client)
    choice = reply.choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me see."
    assert [(c.type, c.function.name, json.loads(c.function.arguments)) for c in calls] == [
        ("function", "get_weather", {"city": "Malmö 🙂"}),
        ("function", "now", {}),
    ]
    assert all(call.id.startswith("call_") for call in calls)
    assert len({call.id for call in calls}) == 2
    for message in (parts[0], wide[0]):
        assert (message["content"], message["end"]) == ("Let me see.", "tool_calls")
        assert [call[1:] for call in message["calls"]] == [[c.function.name, c.function.arguments] for c in calls]
    pieces = [c.choices[0].delta.tool_calls for c in chunks if c.choices and c.choices[0].delta.tool_calls]
    assert len(pieces) > 2  # arguments are streamed as they are generated


async def test_an_answer_without_a_call(tools_folder: Path) -> None:
    async with tool_server(tools_folder, "It is sunny. 1 < 2 <tool") as (_, client, _script):
        reply = await client.chat.completions.create(**asked())
        parts, _ = await streamed(client)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("It is sunny. 1 < 2 <tool", "stop")
    assert reply.choices[0].message.tool_calls is None
    assert parts[0] == {"content": "It is sunny. 1 < 2 <tool", "reasoning": "", "calls": [], "end": "stop"}


async def test_a_call_that_is_cut_off_ends_with_length(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALL) as (_, client, _script):
        reply = await client.chat.completions.create(**asked(max_completion_tokens=40))
    choice = reply.choices[0]
    assert choice.finish_reason == "length"
    assert choice.message.tool_calls[0].function.arguments.startswith('{"c')
    assert reply.usage.completion_tokens == 40


async def test_the_template_shows_tools_calls_and_results(tools_folder: Path) -> None:
    turns = [
        *ASK,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "now", "arguments": '{"x": [1]}'}}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "12:00"},
    ]
    async with tool_server(tools_folder, "ok") as (_, client, script):
        await client.chat.completions.create(**asked() | {"messages": turns})
        counted = await client.post("/../tokenize", body={"messages": turns, "tools": [WEATHER, CLOCK]}, cast_to=object)
    prompt = prompt_text(tools_folder, prompt_of(script.submissions[-1]))
    assert json.dumps(WEATHER, ensure_ascii=False) in prompt
    assert '<|im_start|>assistant\n<tool_call>{"name": "now", "arguments": {"x": [1]}}</tool_call><|im_end|>' in prompt
    assert "<|im_start|>tool\n12:00<|im_end|>" in prompt
    assert counted["count"] == script.submissions[-1].num_prompt_tokens


@pytest.mark.parametrize("cut", ['{"city": "Malm', "{'city': 1}", '{"city": "\\ud83d', "now"])
async def test_a_truncated_call_stays_part_of_the_conversation(tools_folder: Path, cut: str) -> None:
    """Checks each API, since a client sends such a call back with every later turn."""
    called = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": cut}}
    turns = [*ASK, {"role": "assistant", "content": None, "tool_calls": [called]}, *ASK]
    item = {"type": "function_call", "call_id": "c1", "name": "now", "arguments": cut}
    block = {"type": "tool_use", "id": "c1", "name": "now", "input": {"INVALID_JSON": cut}}
    async with tool_server(tools_folder, "ok") as (frontend, client, script):
        await client.chat.completions.create(**asked() | {"messages": turns})
        await client.responses.create(model="talking", input=[*ASK, item, *ASK])
        blocks = [*ASK, {"role": "assistant", "content": [block]}, *ASK]
        asking = {"model": "talking", "max_tokens": 5, "messages": blocks}
        assert (await frontend.http.post("/v1/messages", json=asking)).status_code == 200
    for submission in script.submissions:
        written = json.dumps({"name": "now", "arguments": {"INVALID_JSON": cut}}, ensure_ascii=False)
        assert f"<tool_call>{written}</tool_call>" in prompt_text(tools_folder, prompt_of(submission))


async def test_choice_none_hides_the_tools(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALL) as (_, client, script):
        reply = await client.chat.completions.create(**asked(tool_choice="none"))
    assert "get_weather" not in prompt_text(tools_folder, prompt_of(script.submissions[-1]))
    assert "get_weather" in reply.choices[0].message.content  # a call that the model makes nevertheless is content
    assert reply.choices[0].finish_reason == "stop"


async def test_one_call_at_most_without_parallel_calls(tools_folder: Path) -> None:
    async with tool_server(tools_folder, f"{CALLS} Done.") as (_, client, _script):
        reply = await client.chat.completions.create(**asked(parallel_tool_calls=False))
        parts, _ = await streamed(client, parallel_tool_calls=False)
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_weather"]
    assert [call[1] for call in parts[0]["calls"]] == ["get_weather"]
    assert parts[0]["content"] == reply.choices[0].message.content == "Let me see."


async def test_each_sample_has_separate_calls(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALLS) as (_, client, _script):
        reply = await client.chat.completions.create(**asked(n=3, temperature=1.0))
        parts, _ = await streamed(client, n=3, temperature=1.0)
    ids = [call.id for choice in reply.choices for call in choice.message.tool_calls]
    assert len(set(ids)) == 6
    assert [len(message["calls"]) for message in parts.values()] == [2, 2, 2]


async def test_logprobs_token_ids_and_usage_cover_the_markup(tools_folder: Path) -> None:
    more: dict[str, Any] = {"logprobs": True, "top_logprobs": 1, "extra_body": {"return_token_ids": True}}
    async with tool_server(tools_folder, CALLS) as (_, client, _script):
        reply = await client.chat.completions.create(**asked(**more))
        _, chunks = await streamed(client, **more, stream_options={"include_usage": True})
    choice = reply.choices[0]
    assert len(choice.logprobs.content) == len(choice.token_ids) == reply.usage.completion_tokens
    assert "<tool_call>" in [entry.token for entry in choice.logprobs.content]
    opened = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert [i for c in opened for i in getattr(c, "token_ids", None) or ()] == choice.token_ids
    assert [e.token for c in opened if c.logprobs for e in c.logprobs.content] == [
        entry.token for entry in choice.logprobs.content
    ]
    assert chunks[-1].usage == reply.usage


async def test_stop_strings_do_not_end_calls(tools_folder: Path) -> None:
    """Checks that they apply to the content only; clients that send some with every request would lose calls
    otherwise."""
    for stop in (" 🙂", '"', "}", "get_weather", "</tool_call>"):
        async with tool_server(tools_folder, CALLS) as (_, client, _script):
            reply = await client.chat.completions.create(**asked(stop=[stop]))
            parts, _ = await streamed(client, stop=[stop])
        choice = reply.choices[0]
        assert (choice.finish_reason, choice.stop_reason, choice.message.content) == ("tool_calls", None, "Let me see.")
        arguments = [call.function.arguments for call in choice.message.tool_calls]
        assert list(map(json.loads, arguments)) == [{"city": "Malmö 🙂"}, {}]
        assert [call[2] for call in parts[0]["calls"]] == arguments


@pytest.mark.parametrize(
    ("more", "field", "text"),
    [
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "when it is used, tools must be set"),
        ({"tools": [{"type": "function"}]}, "tools", "tools[0]: function must be an object"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools", "name must be a text that is not empty"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": "x"}}]},
            "tools",
            "tools[0]: parameters must be a JSON Schema object, got 'x'",
        ),
        ({"tools": None, "tool_choice": "required"}, "tool_choice", "when it is used, tools must be set"),
        ({"tool_choice": "any"}, "tool_choice", "tool_choice must be none, auto, required, a function"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "fly"}}},
            "tool_choice",
            "'fly' is not the name of one of the tools",
        ),
    ],
)
async def test_refusals(tools_folder: Path, more: dict[str, Any], field: str, text: str) -> None:
    async with tool_server(tools_folder, "x") as (_, client, _script):
        body = {name: value for name, value in asked(**more).items() if value is not None}
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**body)
    assert text in refused.value.body["message"]
    assert refused.value.param == field


@pytest.mark.parametrize("choice", [None, "auto", "none"])
async def test_an_empty_list_of_tools_is_none(tools_folder: Path, choice: str | None) -> None:
    """fast-agent#781, pi#3649, ogx#1955, vllm PR 49346: clients without tools send [], and were refused."""
    async with tool_server(tools_folder, "plain text") as (_, client, script):
        more = {} if choice is None else {"tool_choice": choice}
        reply = await client.chat.completions.create(**{**asked(), "tools": [], **more})
        prompts = [prompt_text(tools_folder, prompt_of(script.submissions[-1]))]
        await client.chat.completions.create(**{name: value for name, value in asked().items() if name != "tools"})
        prompts.append(prompt_text(tools_folder, prompt_of(script.submissions[-1])))
    assert reply.choices[0].message.content == "plain text"
    assert prompts[0] == prompts[1]


async def test_allowed_tools_are_the_only_ones_shown(tools_folder: Path) -> None:
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "now"}}]}
    async with tool_server(tools_folder, "x") as (_, client, script):
        await client.chat.completions.create(**asked(tool_choice={"type": "allowed_tools", "allowed_tools": allowed}))
    assert "get_weather" not in prompt_text(tools_folder, prompt_of(script.submissions[-1]))
    assert '"now"' in prompt_text(tools_folder, prompt_of(script.submissions[-1]))


async def test_models_without_a_known_format_refuse_tools(folder: Path, tools_folder: Path, tmp_path: Path) -> None:
    async with tool_server(folder, "x") as (_, client, _script):
        with pytest.raises(openai.BadRequestError, match="start the server with --tool-call-parser"):
            await client.chat.completions.create(**asked() | {"model": "tiny"})
    async with tool_server(folder, "x", tool_call_parser="hermes") as (_, client, _script):
        with pytest.raises(openai.BadRequestError, match="chat template does not show tools"):
            await client.chat.completions.create(**asked() | {"model": "tiny"})
    async with tool_server(tools_folder, "x", enable_auto_tool_choice=False) as (_, client, _script):
        with pytest.raises(openai.BadRequestError, match="is disabled on this server"):
            await client.chat.completions.create(**asked())
    other = tmp_path / "other.jinja"
    other.write_text("{% for tool in tools %}{{ tool.function.name }}{% endfor %}")
    async with tool_server(folder, '[TOOL_CALLS]now{"a": 1}', tool_call_parser="mistral", chat_template=str(other)) as (
        _,
        client,
        script,
    ):
        reply = await client.chat.completions.create(**asked() | {"model": "tiny"})
    assert prompt_text(folder, prompt_of(script.submissions[-1])) == "get_weathernow"
    assert len(reply.choices[0].message.tool_calls[0].id) == 9


async def test_special_tokens_of_calls_are_not_content(tools_folder: Path) -> None:
    """Checks malformed calls and mere mentions; skip_special_tokens=false shows the markup."""
    text = 'The tag <tool_call> and </tool_call>.<tool_call>{"name": "now", "arguments": [1]}</tool_call>'
    async with tool_server(tools_folder, text) as (_, client, _script):
        reply = await client.chat.completions.create(**asked())
        shown = await client.chat.completions.create(**asked(extra_body={"skip_special_tokens": False}))
    assert reply.choices[0].message.content == 'The tag  and .{"name": "now", "arguments": [1]}'
    assert shown.choices[0].message.content == 'The tag <tool_call> and </tool_call>.{"name": "now", "arguments": [1]}'


async def test_a_truncated_call_has_json_arguments_or_is_dropped(tools_folder: Path) -> None:
    lengths = set()
    async with tool_server(tools_folder, CALL) as (_, client, _script):
        for max_tokens in range(1, 60, 4):
            choice = (await client.chat.completions.create(**asked(max_tokens=max_tokens))).choices[0]
            assert choice.message.content in (None, "")
            for call in choice.message.tool_calls or ():
                lengths.add(len(json.loads(call.function.arguments)["city"]))
    assert len(lengths) > 1
