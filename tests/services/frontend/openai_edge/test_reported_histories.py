"""Tests of histories that coding assistants sent to other servers, and that failed there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, CALL, WEATHER, tool_model_folder, tool_server

SHELL: dict[str, Any] = {"type": "function", "name": "shell", "parameters": {"type": "object", "properties": {}}}
HI: dict[str, Any] = {"type": "message", "role": "user", "content": "hi"}
CALLED: dict[str, Any] = {"type": "function_call", "call_id": "c", "name": "shell", "arguments": "{}"}
GIVEN: dict[str, Any] = {"type": "function_call_output", "call_id": "c"}


def user(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n"


def assistant(text: str) -> str:
    return f"<|im_start|>assistant\n{text}<|im_end|>\n"


def tool(text: str) -> str:
    return f"<|im_start|>tool\n{text}<|im_end|>\n"


def called(name: str, arguments: Any) -> str:
    return assistant(f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>")


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def prompt(folder: Path, path: str, body: dict[str, Any]) -> str:
    async with tool_server(folder, "ok") as (frontend, _, script):
        answer = await frontend.http.post(path, json={"model": "talking", **body})
        assert answer.status_code == 200, answer.text
        return prompt_text(folder, prompt_of(script.submissions[0])).removesuffix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("items", "shown"),
    [
        # vllm#45273: an assistant message without parts or content, arguments that are two objects
        ([HI, {"type": "message", "role": "assistant", "content": []}, HI], user("hi") + assistant("") + user("hi")),
        ([HI, {"type": "message", "role": "assistant", "content": None}, HI], user("hi") + assistant("") + user("hi")),
        ([HI, {"role": "assistant"}, HI], user("hi") + assistant("") + user("hi")),
        (
            [{**CALLED, "arguments": '{"a":1}{"b":2}'}],
            called("shell", {"INVALID_JSON": '{"a":1}{"b":2}'}),
        ),
        ([{**CALLED, "arguments": {"command": ["ls"]}}], called("shell", {"command": ["ls"]})),
        ([{"type": None, "role": "user", "content": "hi"}], user("hi")),
        # llama.cpp#23465: tool outputs in parts of any text type, as an object from older Codex versions, and none
        (
            [CALLED, {**GIVEN, "output": [{"type": "output_text", "text": "x"}]}],
            called("shell", {}) + tool("x"),
        ),
        (
            [CALLED, {**GIVEN, "output": {"content": "é", "success": True}}],
            called("shell", {}) + tool('{"content": "é", "success": true}'),
        ),
        ([CALLED, {**GIVEN, "output": None}], called("shell", {}) + tool("")),
        # openai/codex#6945: a search whose action is of no published type
        ([{"type": "web_search_call", "status": "completed", "action": {"type": "other"}}, HI], user("hi")),
        # coder/coder#28656, openai/codex protocol: messages of other agents, settings within the conversation
        (
            [
                {
                    "type": "agent_message",
                    "author": "planner",
                    "recipient": "root",
                    "content": [{"type": "input_text", "text": "Done."}, {"type": "encrypted_content", "data": "gA"}],
                },
                {"type": "configuration_update", "model": "x"},
            ],
            user("Message from planner:\nDone."),
        ),
        # OpenAI's tools that clients run
        (
            [
                {"type": "shell_call", "call_id": "c", "action": {"commands": ["ls"]}, "status": "completed"},
                {"type": "shell_call_output", "call_id": "c", "output": [{"stdout": "a", "stderr": ""}]},
            ],
            called("shell", {"commands": ["ls"]}) + tool('[{"stdout": "a", "stderr": ""}]'),
        ),
        (
            [
                {"type": "apply_patch_call", "call_id": "c", "operation": {"type": "delete_file", "path": "a"}},
                {"type": "apply_patch_call_output", "call_id": "c", "status": "completed", "output": "ok"},
            ],
            called("apply_patch", {"type": "delete_file", "path": "a"}) + tool("ok"),
        ),
        ([{"role": "assistant", "content": [{"type": "summary_text", "text": "So."}]}], assistant("So.")),
    ],
)
async def test_items_of_responses(tool_model: Path, items: list[dict[str, Any]], shown: str) -> None:
    assert await prompt(tool_model, "/v1/responses", {"input": items}) == shown


async def test_tools_that_an_item_adds_are_offered_and_called(tool_model: Path) -> None:
    space = {"type": "namespace", "name": "mcp__fs", "tools": [{"type": "function", "name": "get_weather"}]}
    reply = CALL.replace("get_weather", "mcp__fs__get_weather")
    async with tool_server(tool_model, reply) as (frontend, _, script):
        items = [{"type": "additional_tools", "role": "developer", "tools": [SHELL, space]}, HI]
        answer = await frontend.http.post("/v1/responses", json={"model": "talking", "input": items})
        assert answer.status_code == 200, answer.text
        shown = prompt_text(tool_model, prompt_of(script.submissions[0]))
    assert '"name": "shell"' in shown
    (item,) = answer.json()["output"]
    assert (item["namespace"], item["name"]) == ("mcp__fs", "get_weather")


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "compaction_trigger"}, "'compaction_trigger' are not supported by this server; ask for a summary"),
        ({"type": "item_reference", "id": "rs_1"}, "'item_reference' are not supported by this server; send the item"),
        ({"type": "additional_tools"}, "additional_tools needs a list of tools"),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
            "parts of type 'input_image' are not supported by this server: models are given text only, not pictures",
        ),
        (
            {
                "type": "function_call_output",
                "call_id": "c",
                "output": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}],
            },
            "input[0].output: parts of type 'input_image' are not supported",
        ),
    ],
)
async def test_items_that_cannot_be_read_are_named(tool_model: Path, item: dict[str, Any], message: str) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        answer = await frontend.http.post("/v1/responses", json={"model": "talking", "input": [item]})
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]


async def test_include_of_tools_that_do_not_run_has_no_effect(tool_model: Path) -> None:
    """Checks that such names are accepted: the Agents SDK requests the results of each tool that it knows."""
    named = ["file_search_call.results", "web_search_call.results", "code_interpreter_call.outputs"]
    assert await prompt(tool_model, "/v1/responses", {"input": "hi", "include": named}) == user("hi")


@pytest.mark.parametrize(
    ("messages", "shown"),
    [
        # autogen#5814: an empty list of calls
        ([*ASK, {"role": "assistant", "content": "x", "tool_calls": []}, *ASK], assistant("x")),
        # function_call, the predecessor of tool calls, was silently lost
        (
            [
                *ASK,
                {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": "{}"}},
                {"role": "function", "name": "now", "content": "5"},
            ],
            called("now", {}) + tool("5"),
        ),
    ],
)
async def test_messages_of_chats(tool_model: Path, messages: list[dict[str, Any]], shown: str) -> None:
    assert shown in await prompt(tool_model, "/v1/chat/completions", {"messages": messages})


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": [{"type": "text", "text": "I look."}], "closed": True},  # Mistral's clients
        {"type": "thinking", "thinking": "I look.", "signature": "x"},
        {"type": "reasoning", "text": "I look."},
    ],
)
async def test_reasoning_among_the_parts_is_reasoning(tmp_path: Path, part: dict[str, Any]) -> None:
    template = "{% for m in messages %}{{ m.role }}:{{ m.reasoning_content or '' }}|{{ m.content }};{% endfor %}"
    folder = tool_model_folder(tmp_path / "talking", template)
    messages = [*ASK, {"role": "assistant", "content": [part, {"type": "text", "text": "Yes."}]}, *ASK]
    assert "assistant:I look.|Yes.;" in await prompt(folder, "/v1/chat/completions", {"messages": messages})


async def test_deltas_of_a_call_have_one_name_and_an_index_from_zero(tool_model: Path) -> None:
    """Checks opencode#37841, sglang#35542, vllm#18412, pipecat#4987: ids repeated as null or "", first call
    numbered 1."""
    reply = f"<think>\nI look.\n</think>\n\nSo.\n{CALL}\n{CALL}"
    async with tool_server(tool_model, reply) as (frontend, _, script):
        frontend.write_each_token(script)
        body = {"model": "talking", "messages": ASK, "tools": [WEATHER], "stream": True}
        async with frontend.http.stream("POST", "/v1/chat/completions", json=body) as reply:
            lines = [line[6:] async for line in reply.aiter_lines() if line.startswith("data: {")]
    pieces = [
        piece
        for line in lines
        for choice in json.loads(line)["choices"]
        for piece in choice["delta"].get("tool_calls") or ()
    ]
    named = [piece for piece in pieces if "id" in piece]
    assert [(piece["index"], piece["function"]["name"]) for piece in named] == [(0, "get_weather"), (1, "get_weather")]
    assert all(piece["id"] for piece in named)
    assert all("name" not in piece["function"] for piece in pieces if "id" not in piece)
    assert len(pieces) > 4


CALL_A, CALL_B = (
    {
        "id": f"call_{letter}",
        "type": "function",
        "function": {"name": "read", "arguments": json.dumps({"item": letter})},
    }
    for letter in "ab"
)
ASKED_TWICE = assistant(
    "".join(f'<tool_call>{{"name": "read", "arguments": {{"item": "{letter}"}}}}</tool_call>' for letter in "ab")
)


def result(call_id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call_id, "content": content}


@pytest.mark.parametrize(
    ("results", "shown"),
    [
        # colibri#118, token.js#36, oh-my-pi#11179: results in the order in which the tools ended
        ([result("call_b", "of b"), result("call_a", "of a")], ["of a", "of b"]),
        ([result("call_a", "of a"), result("call_b", "of b")], ["of a", "of b"]),
        # dify-official-plugins#2352: a result is missing
        ([result("call_b", "of b")], ["of b"]),
        # two results of one call keep their order, those of no call come last
        ([result("call_b", "1"), result("call_b", "2"), result("call_a", "of a")], ["of a", "1", "2"]),
        ([result("other", "x"), result("call_b", "of b"), result("call_a", "of a")], ["of a", "of b", "x"]),
        # without ids, only their order is known
        ([{"role": "tool", "content": "1"}, result("call_a", "2")], ["1", "2"]),
    ],
)
async def test_results_of_parallel_calls_are_shown_in_the_order_of_the_calls(
    tool_model: Path, results: list[dict[str, Any]], shown: list[str]
) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL_A, CALL_B]}
    found = await prompt(tool_model, "/v1/chat/completions", {"messages": [*ASK, turn, *results, *ASK]})
    assert ASKED_TWICE + "".join(tool(text) for text in shown) + user("How is the weather?") in found


async def test_results_stay_with_their_turn(tool_model: Path) -> None:
    turn = {"role": "assistant", "content": None, "tool_calls": [CALL_A, CALL_B]}
    swapped = [result("call_b", "of b"), result("call_a", "of a")]
    found = await prompt(tool_model, "/v1/chat/completions", {"messages": [*ASK, turn, *swapped, turn, *swapped]})
    assert found.endswith((ASKED_TWICE + tool("of a") + tool("of b")) * 2)


async def test_results_of_responses_and_messages_are_ordered_alike(tool_model: Path) -> None:
    """Checks CLIProxyAPI#5199: a coding assistant sends the results of parallel reads permuted."""
    items = [{**CALLED, "call_id": letter, "name": "read", "arguments": f'{{"item": "{letter}"}}'} for letter in "ab"]
    outputs = [{**GIVEN, "call_id": letter, "output": f"of {letter}"} for letter in "ba"]
    responses = await prompt(tool_model, "/v1/responses", {"input": [*items, *outputs]})
    uses = [{"type": "tool_use", "id": letter, "name": "read", "input": {"item": letter}} for letter in "ab"]
    given = [{"type": "tool_result", "tool_use_id": letter, "content": f"of {letter}"} for letter in "ba"]
    turns = [*ASK, {"role": "assistant", "content": uses}, {"role": "user", "content": given}]
    messages = await prompt(tool_model, "/v1/messages", {"messages": turns, "max_tokens": 5})
    assert responses.endswith(ASKED_TWICE + tool("of a") + tool("of b"))
    assert messages.endswith(ASKED_TWICE + tool("of a") + tool("of b"))


@pytest.mark.parametrize(
    ("tools", "kinds"),
    [
        ([{"type": "local_shell"}], "local_shell"),
        ([{"type": "web_search"}, {"type": "local_shell"}], "local_shell, web_search"),
        ([{"type": "namespace", "name": "fs", "tools": [{"type": "web_search"}]}], "namespace"),
    ],
)
async def test_a_required_call_needs_a_function_and_the_error_names_the_other_tools(
    tool_model: Path, tools: list[dict[str, Any]], kinds: str
) -> None:
    body = {"model": "talking", "input": "hi", "tools": tools}
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        answer = await frontend.http.post("/v1/responses", json={**body, "tool_choice": "required"})
        free = await frontend.http.post("/v1/responses", json={**body, "tool_choice": "auto"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tool_choice")
    assert f"tools of type {kinds} are not supported" in answer.json()["error"]["message"]
    assert free.status_code == 200
