"""Tests of tools, items and fields that the Codex command line sends to /v1/responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import tool_model_folder, tool_server

SHELL: dict[str, Any] = {
    "type": "function",
    "name": "shell",
    "description": "Runs a command.",
    "strict": False,
    "parameters": {"type": "object", "properties": {"command": {"type": "array", "items": {"type": "string"}}}},
}
ISSUES: dict[str, Any] = {
    "type": "namespace",
    "name": "mcp__tracker",
    "description": "Tools of a server.",
    "tools": [
        {
            "type": "function",
            "name": "list_issues",
            "description": "Lists issues.",
            "parameters": {"type": "object", "properties": {"page": {"type": "integer"}}},
        }
    ],
}
CALL = '<tool_call>\n{"name": "mcp__tracker__list_issues", "arguments": {"page": 2}}\n</tool_call>'


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def prompts(folder: Path, *bodies: dict[str, Any]) -> list[str]:
    """Returns the prompt of each body; asserts that all are answered."""
    async with tool_server(folder, "ok") as (frontend, _, script):
        for body in bodies:
            sent = {"model": "talking", "input": "hi", **body}
            answer = await frontend.http.post("/v1/responses", json=sent)
            assert answer.status_code == 200, answer.text
        return [prompt_text(folder, prompt_of(submission)) for submission in script.submissions]


@pytest.mark.parametrize(
    "tool",
    [
        # openai/codex#10635, llama.cpp#20156, unsloth#5141
        {"type": "web_search", "external_web_access": False},
        {"type": "local_shell"},
        {"type": "image_generation", "output_format": "png"},
        {"type": "tool_search", "execution": "client"},
        {"type": "namespace", "name": "empty", "tools": []},
    ],
)
async def test_tools_without_a_schema_are_not_shown(tool_model: Path, tool: dict[str, Any]) -> None:
    both, own, alone, plain = await prompts(
        tool_model,
        {"tools": [SHELL, tool], "tool_choice": "auto"},
        {"tools": [SHELL]},
        {"tools": [tool], "tool_choice": "auto"},
        {},
    )
    assert both == own
    assert alone == plain


async def test_functions_of_a_namespace_are_called_by_their_name_in_it(tool_model: Path) -> None:
    async with tool_server(tool_model, CALL) as (frontend, _client, script):
        frontend.write_each_token(script)
        asked: Any = {"model": "talking", "input": "hi", "tools": [SHELL, ISSUES]}
        whole = (await frontend.http.post("/v1/responses", json=asked)).json()
        async with frontend.http.stream("POST", "/v1/responses", json={**asked, "stream": True}) as reply:
            events = [json.loads(line[6:]) async for line in reply.aiter_lines() if line.startswith("data: ")]
        then = [*whole["output"], {"type": "function_call_output", "call_id": "c", "output": "none"}]
        again = await frontend.http.post("/v1/responses", json={**asked, "input": then})
        assert again.status_code == 200, again.text
    (call,) = whole["output"]
    assert (call["namespace"], call["name"], call["arguments"]) == ("mcp__tracker", "list_issues", '{"page": 2}')
    (streamed,) = events[-1]["response"]["output"]
    assert (streamed["namespace"], streamed["name"]) == ("mcp__tracker", "list_issues")
    first, _, last = (prompt_text(tool_model, prompt_of(one)) for one in script.submissions)
    assert '"name": "mcp__tracker__list_issues"' in first
    assert '<tool_call>{"name": "mcp__tracker__list_issues"' in last


async def test_items_of_turns_that_another_server_answered(tool_model: Path) -> None:
    """Checks that encrypted reasoning and compactions are dropped, and that calls run by the client are kept."""
    items: list[dict[str, Any]] = [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Patch it."}]},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": None, "encrypted_content": "gAAAA"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "custom_tool_call", "call_id": "c1", "name": "apply_patch", "input": "*** Begin Patch\n"},
        {"type": "custom_tool_call_output", "call_id": "c1", "output": "Done"},
        {
            "type": "local_shell_call",
            "call_id": "c2",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        },
        {"type": "local_shell_call_output", "call_id": "c2", "output": '{"output": "a.py"}'},
    ]
    (prompt,) = await prompts(tool_model, {"input": items, "tools": [SHELL]})
    assert prompt.endswith(
        '<|im_start|>assistant\n<tool_call>{"name": "apply_patch", "arguments": {"input": "*** Begin Patch\\n"}}'
        "</tool_call><|im_end|>\n<|im_start|>tool\nDone<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>{"name": "local_shell", "arguments": {"command": ["ls"], "env": {}}}'
        '</tool_call><|im_end|>\n<|im_start|>tool\n{"output": "a.py"}<|im_end|>\n<|im_start|>assistant\n'
    )


async def test_other_fields_do_not_change_the_prompt(tool_model: Path) -> None:
    fields = {
        "client_metadata": {"x-codex-installation-id": "0"},
        "prompt_cache_key": "0199",
        "service_tier": None,
        "store": False,
        "include": ["reasoning.encrypted_content", "web_search_call.action.sources"],
        "text": {"verbosity": "low"},
        "reasoning": {"summary": "auto"},
    }
    with_fields, plain = await prompts(tool_model, fields, {})
    assert with_fields == plain


@pytest.mark.parametrize(
    ("item", "text"),
    [
        ({"type": "custom_tool_call", "name": "apply_patch"}, "input[0]: a custom_tool_call needs a name and"),
        ({"type": "local_shell_call", "action": "ls"}, "input[0]: a local_shell_call needs an action, an object"),
    ],
)
async def test_a_call_that_is_incomplete_is_named(tool_model: Path, item: dict[str, Any], text: str) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        answer = await frontend.http.post("/v1/responses", json={"model": "talking", "input": [item]})
    assert answer.status_code == 400
    assert text in answer.json()["error"]["message"]
