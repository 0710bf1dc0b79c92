"""Tests of the constraints for tool_choice required and named, and for output formats with tools and reasoning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.services.frontend.scripted_scheduler import ScriptedScheduler
from tests.services.frontend.tool_model import ASK, CALL, CALLS, CLOCK, WEATHER, tool_model_folder, tool_server

NAMED = {"type": "function", "function": {"name": "get_weather"}}
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def tools_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


def asked(**more: Any) -> dict[str, Any]:
    return {"model": "talking", "messages": ASK, "tools": [WEATHER, CLOCK], **more}


def constraint(script: ScriptedScheduler) -> str:
    """Returns the constraint of the last submission as text."""
    form = script.submissions[-1].sampling.structured_output
    assert form.WhichOneof("constraint") == "structural_tag"
    return json.dumps(json.loads(form.structural_tag)["format"], ensure_ascii=False)


async def test_required_calls_are_enforced_in_the_models_native_format(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALLS.partition("\n")[2]) as (_, client, script):
        reply = await client.chat.completions.create(**asked(tool_choice="required"))
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_weather", "now"]
    assert reply.choices[0].finish_reason == "tool_calls"
    text = constraint(script)
    assert '<tool_call>\\n{\\"name\\": \\"get_weather\\", \\"arguments\\": ' in text
    assert json.dumps(WEATHER["function"]["parameters"]) in text
    assert '\\"now\\"' in text
    assert '"star"' in text


async def test_a_named_function_is_called_once(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALL) as (_, client, script):
        reply = await client.chat.completions.create(**asked(tool_choice=NAMED))
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_weather"]
    assert reply.choices[0].finish_reason == "stop"
    assert '\\"now\\"' not in constraint(script)
    assert '"star"' not in constraint(script)


@pytest.mark.parametrize(
    ("variables", "begins"),
    [({}, '{"type": "optional", "content": {"type": "sequence"'), ({"enable_thinking": True}, '{"type": "any_text"}')],
)
async def test_reasoning_stays_free(tools_folder: Path, variables: dict[str, Any], begins: str) -> None:
    more = {"extra_body": {"chat_template_kwargs": variables}}
    for body in (asked(tool_choice="required"), asked(response_format=AS_JSON), asked(response_format=AS_JSON)):
        if "response_format" in body:
            del body["tools"]
        async with tool_server(tools_folder, "x") as (_, client, script):
            await client.chat.completions.create(**body, **more)
        assert constraint(script).startswith('{"type": "sequence", "elements": [' + begins)


async def test_a_response_format_does_not_apply_to_required_calls(tools_folder: Path) -> None:
    async with tool_server(tools_folder, CALL) as (_, client, script):
        reply = await client.chat.completions.create(**asked(response_format=AS_JSON, tool_choice="required"))
        assert json.dumps(SCHEMA) not in constraint(script)
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["get_weather"]


async def test_a_response_format_leaves_calls_to_the_model(tools_folder: Path) -> None:
    async with tool_server(tools_folder, '{"ok": true}') as (_, client, script):
        reply = await client.chat.completions.create(**asked(response_format=AS_JSON))
        form = {"structured_outputs": {"json": SCHEMA}}
        with pytest.raises(openai.BadRequestError, match="cannot be combined"):
            await client.chat.completions.create(**asked(tool_choice="required", extra_body=form))
    assert reply.choices[0].message.content == '{"ok": true}'
    assert json.dumps(SCHEMA) in constraint(script)
    assert "get_weather" in constraint(script)


async def test_a_response_format_without_tools_is_sent_unchanged(folder: Path) -> None:
    """Checks a model that does not reason: the format needs no reasoning part."""
    async with tool_server(folder, '{"ok": true}') as (_, client, script):
        await client.chat.completions.create(model="tiny", messages=ASK, response_format=AS_JSON)
    assert json.loads(script.submissions[-1].sampling.structured_output.json_schema) == SCHEMA


async def test_models_without_an_enforceable_format_must_write_json(tools_folder: Path) -> None:
    text = '[{"name": "now", "arguments": {}}]'
    async with tool_server(tools_folder, text, tool_call_parser="pythonic") as (_, client, script):
        reply = await client.chat.completions.create(**asked(tool_choice="required"))
    assert [call.function.name for call in reply.choices[0].message.tool_calls] == ["now"]
    assert '{\\"name\\": \\"now\\"' in constraint(script)


async def test_tool_schemas_that_do_not_compile_are_errors_of_tools(tools_folder: Path) -> None:
    broken = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "required": 5}}}
    async with tool_server(tools_folder, "x") as (_, client, _script):
        with pytest.raises(openai.BadRequestError, match=r"^Error code: 400 - tools: it cannot be compiled") as refused:
            await client.chat.completions.create(**asked(tools=[broken], tool_choice="required"))
    assert refused.value.param == "tools"


async def test_strict_tools_are_constrained_from_their_marker_on(tools_folder: Path) -> None:
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    async with tool_server(tools_folder, CALL) as (_, client, script):
        reply = await client.chat.completions.create(**asked(tools=[strict, CLOCK]))
        await client.chat.completions.create(**asked())
        broken = {"type": "function", "function": {"name": "f", "strict": True, "parameters": {"required": 5}}}
        with pytest.raises(openai.BadRequestError, match="tools: it cannot be compiled"):
            await client.chat.completions.create(**asked(tools=[broken]))
    assert reply.choices[0].finish_reason == "tool_calls"
    form = json.loads(script.submissions[0].sampling.structured_output.structural_tag)["format"]
    assert (form["type"], form["triggers"]) == ("triggered_tags", ["<tool_call>"])
    schemas = [tag["content"]["elements"][0]["json_schema"] for tag in form["tags"]]
    assert schemas == [WEATHER["function"]["parameters"], {"type": "object"}]
    assert not script.submissions[1].sampling.HasField("structured_output")
