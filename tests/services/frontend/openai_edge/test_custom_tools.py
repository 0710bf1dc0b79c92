"""Tests of custom tools, which take a text instead of JSON: Codex's apply_patch, in /v1/responses and in chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from quire.services.frontend.output_processor.parsing.values.input_extractor import InputExtractor
from tests.services.frontend.output_processor.parsers.reading import pieces
from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, CLOCK, tool_model_folder, tool_server

LARK = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Delete File: " filename LF
filename: /(.+)/

%import common.LF
"""
PATCH = '*** Begin Patch\n*** Delete File: "é".py\n*** End Patch\n'
GRAMMAR = {"syntax": "lark", "definition": LARK}
APPLY_PATCH: dict[str, Any] = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files. This is a FREEFORM tool, so do not wrap the patch in JSON.",
    "format": {"type": "grammar", **GRAMMAR},
}
IN_CHATS: dict[str, Any] = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": APPLY_PATCH["description"],
        "format": {"type": "grammar", "grammar": GRAMMAR},
    },
}


def written(arguments: dict[str, Any], name: str = "apply_patch") -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


CALL = written({"input": PATCH})


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.mark.parametrize("choice", ["auto", {"type": "custom", "name": "apply_patch"}])
async def test_a_call_in_responses(tool_model: Path, choice: Any) -> None:
    """Checks openai/codex#10635: the tool was dropped, so that the model could not edit files."""
    asked: Any = {"model": "talking", "input": "hi", "tools": [APPLY_PATCH], "tool_choice": choice}
    async with tool_server(tool_model, CALL) as (frontend, client, script):
        frontend.write_each_token(script)
        whole = await client.responses.create(**asked)
        events = [event async for event in await client.responses.create(**asked, stream=True)]
        sent = [item.model_dump(exclude={"id", "status"}, exclude_none=True) for item in whole.output]
        sent.append({"type": "custom_tool_call_output", "call_id": whole.output[0].call_id, "output": "Done"})
        await client.responses.create(**{**asked, "input": sent})
        shown, _, again = (prompt_text(tool_model, prompt_of(one)) for one in script.submissions)
    (call,) = whole.output
    assert (call.type, call.name, call.input, call.status) == ("custom_tool_call", "apply_patch", PATCH, "completed")
    deltas = [event for event in events if event.type == "response.custom_tool_call_input.delta"]
    (done,) = (event for event in events if event.type == "response.custom_tool_call_input.done")
    assert len(deltas) > 5  # the text is streamed as it is generated
    assert "".join(event.delta for event in deltas) == done.input == PATCH
    assert {event.item_id for event in deltas} == {done.item_id} == {events[-1].response.output[0].id}
    function = json.loads(shown.partition("<|im_start|>system\n")[2].partition("\n")[0])["function"]
    assert (function["name"], list(function["parameters"]["properties"])) == ("apply_patch", ["input"])
    assert LARK in function["parameters"]["properties"]["input"]["description"]
    assert json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}, ensure_ascii=False) in again
    assert "Done" in again


async def test_a_call_in_chats(tool_model: Path) -> None:
    """Checks both kinds of tools in one answer; streamed pieces add up to the whole."""
    asked: Any = {"model": "talking", "messages": ASK, "tools": [IN_CHATS, CLOCK]}
    async with tool_server(tool_model, f"{CALL}\n{written({}, 'now')}") as (frontend, client, script):
        frontend.write_each_token(script)
        whole = (await client.chat.completions.create(**asked)).choices[0]
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked, stream=True)]
        turns = [
            whole.message.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": whole.message.tool_calls[0].id, "content": "Done"},
        ]
        await client.chat.completions.create(**{**asked, "messages": [*ASK, *turns]})
        again = prompt_text(tool_model, prompt_of(script.submissions[-1]))
    patch, now = whole.message.tool_calls
    assert (whole.finish_reason, patch.type, patch.custom.name, patch.custom.input) == (
        "tool_calls",
        "custom",
        "apply_patch",
        PATCH,
    )
    assert (now.type, now.function.name, now.function.arguments) == ("function", "now", "{}")
    calls = [call.model_dump() for chunk in chunks if chunk.choices for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join((call.get("custom") or {}).get("input", "") for call in calls if call["index"] == 0) == PATCH
    assert [(call["type"], call["index"]) for call in calls if call["id"]] == [("custom", 0), ("function", 1)]
    assert json.dumps({"name": "apply_patch", "arguments": {"input": PATCH}}, ensure_ascii=False) in again


async def test_required_calls_may_call_custom_tools(tool_model: Path) -> None:
    """Checks codex-proxy#707: a coding assistant that edits files with a single grammar tool."""
    asked: Any = {"model": "talking", "input": "hi", "tools": [APPLY_PATCH], "tool_choice": "required"}
    async with tool_server(tool_model, CALL) as (_, client, _script):
        (call,) = (await client.responses.create(**asked)).output
    assert (call.type, call.input) == ("custom_tool_call", PATCH)


@pytest.mark.parametrize(
    "definition", ["start: /.+/s", "start: /(?s).+/"]
)  # workbuddy2api-intl PR 12, foundry-local#1080
async def test_grammars_that_people_send(tool_model: Path, definition: str) -> None:
    tool: dict[str, Any] = {
        "type": "custom",
        "custom": {
            "name": "freeform_tool",
            "description": "Accepts freeform input.",
            "format": {"type": "grammar", "grammar": {"type": "grammar", "syntax": "lark", "definition": definition}},
        },
    }
    reply_text = (
        "<tool_call>\n<function=freeform_tool>\n<parameter=input>\na\nb\n</parameter>\n</function>\n</tool_call>"
    )
    async with tool_server(tool_model, reply_text, tool_call_parser="qwen3_coder") as (_, client, script):
        asked: Any = {"model": "talking", "messages": ASK, "tools": [tool, CLOCK]}
        (call,) = (await client.chat.completions.create(**asked)).choices[0].message.tool_calls
        constraint = script.submissions[0].sampling.structured_output.structural_tag
    assert (call.type, call.custom.input) == ("custom", "a\nb")
    assert json.dumps(definition) in constraint


async def test_custom_tools_of_a_namespace(tool_model: Path) -> None:
    space = {"type": "namespace", "name": "fs", "tools": [{"type": "custom", "name": "patch"}]}
    async with tool_server(tool_model, written({"input": "x"}, "fs__patch")) as (_, client, _script):
        (call,) = (await client.responses.create(model="talking", input="hi", tools=[space])).output
    assert (call.type, call.namespace, call.name, call.input) == ("custom_tool_call", "fs", "patch", "x")


@pytest.mark.parametrize(
    ("format", "text"),
    [
        ({"type": "xml"}, "format must be"),
        ({"type": "grammar", "syntax": "gbnf", "definition": "x"}, "must be lark or regex, got 'gbnf'"),
        ({"type": "grammar", "syntax": "lark"}, "definition of a grammar must be a text"),
        ({"type": "grammar", "syntax": "regex", "definition": "("}, "tools"),
    ],
)
async def test_a_malformed_format_is_refused(tool_model: Path, format: Any, text: str) -> None:
    async with tool_server(tool_model, "ok") as (_, client, _script):
        with pytest.raises(openai.BadRequestError, match=text) as refused:
            await client.responses.create(model="talking", input="hi", tools=[{**APPLY_PATCH, "format": format}])
    assert refused.value.param == "tools"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"input": "a\\n\\"b\\" \\ud83d\\ude42"}', 'a\n"b" 🙂'),
        ('{"note": {"input": 1}, "input": "x"}', "x"),
        ('{"input": "cut off', "cut off"),
        ('{"patch": "under another name"}', "under another name"),  # ds4#745, fabro#435
        ('{"a": "x", "b": "y"}', '{"a": "x", "b": "y"}'),
        ('{"input": ["x"]}', '{"input": ["x"]}'),
        ("{}", ""),
        ("", ""),
    ],
)
def test_the_input_is_the_same_for_every_split_of_the_arguments(arguments: str, expected: str) -> None:
    for cut in range(len(arguments) + 1):
        found = InputExtractor()
        assert "".join([*map(found.push, pieces(arguments, [cut])), found.finish()]) == expected
    found = InputExtractor()
    assert "".join([*map(found.push, arguments), found.finish()]) == expected
