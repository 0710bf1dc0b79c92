"""Tests of fields, tools and blocks that Claude Code sends together with the conversation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import tool_model_folder, tool_server

ASK: list[dict[str, Any]] = [{"role": "user", "content": "How is the weather?"}]
BILLING = "x-anthropic-billing-header: cc_version=2.1.37.3a3; cc_entrypoint=cli; cch={};"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def prompts(folder: Path, *bodies: dict[str, Any]) -> list[str]:
    """Returns the prompt of each body; asserts that count_tokens returns its length."""
    async with tool_server(folder, "ok") as (frontend, _, script):
        for number, body in enumerate(bodies):
            sent = {"model": "talking", "messages": ASK, **body}
            answer = await frontend.http.post("/v1/messages", json={"max_tokens": 50, **sent})
            assert answer.status_code == 200, answer.text
            counted = await frontend.http.post("/v1/messages/count_tokens", json=sent)
            assert counted.status_code == 200, counted.text
            assert counted.json()["input_tokens"] == script.submissions[number].num_prompt_tokens
        return [prompt_text(folder, prompt_of(submission)) for submission in script.submissions]


@pytest.mark.parametrize(
    "edits",
    [
        None,
        {},
        {"edits": []},
        # anthropics/claude-code#21612, #14135, litellm#26240
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        {"edits": [{"type": "clear_tool_uses_20250919", "trigger": {"type": "input_tokens", "value": 100000}}]},
    ],
)
async def test_context_management_has_no_effect(tool_model: Path, edits: Any) -> None:
    plain, edited = await prompts(tool_model, {}, {"context_management": edits})
    assert edited == plain


@pytest.mark.parametrize(
    "system",
    [
        # vllm#36829, llama.cpp#20623, ollama#14918: a separate block at the beginning
        [{"type": "text", "text": BILLING}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": BILLING, "cache_control": None}, {"type": "text", "text": "Be brief."}],
        [{"type": "text", "text": BILLING + "\nBe brief."}],
        [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "\n" + BILLING}],
        BILLING + "\n\nBe brief.",
    ],
)
async def test_a_changing_billing_line_does_not_change_the_prompt(tool_model: Path, system: Any) -> None:
    def with_hash(value: str) -> Any:
        if isinstance(system, str):
            return system.format(value)
        return [{**block, "text": block["text"].format(value)} for block in system]

    first, second, plain = await prompts(
        tool_model, {"system": with_hash("aaaaa")}, {"system": with_hash("1b9f0")}, {"system": "Be brief."}
    )
    assert first == second == plain


async def test_billing_lines_are_not_system_messages_and_quoted_ones_are_kept(tool_model: Path) -> None:
    alone, plain, quoted = await prompts(
        tool_model,
        {"system": [{"type": "text", "text": BILLING}]},
        {},
        {"system": f"Never repeat {BILLING}"},
    )
    assert alone == plain
    assert "x-anthropic-billing-header" in quoted


OWN = {"name": "Read", "input_schema": {"type": "object", "properties": {"file_path": {"type": "string"}}}}


@pytest.mark.parametrize(
    "tool",
    [
        {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
        {"type": "web_fetch_20250910", "name": "web_fetch"},
        {"type": "code_execution_20250825", "name": "code_execution"},
        {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"},
        {"type": "mcp_toolset", "mcp_server_name": "tracker"},
    ],
)
async def test_tools_that_anthropics_servers_run_are_not_shown(tool_model: Path, tool: dict[str, Any]) -> None:
    both, alone, own, plain = await prompts(
        tool_model, {"tools": [tool, {**OWN, "defer_loading": True}]}, {"tools": [tool]}, {"tools": [OWN]}, {}
    )
    assert both == own
    assert alone == plain


@pytest.mark.parametrize(
    ("kind", "name", "parameter"),
    [
        ("bash_20250124", "bash", "restart"),
        ("text_editor_20250124", "str_replace_editor", "undo_edit"),
        ("text_editor_20250728", "str_replace_based_edit_tool", "insert_line"),
        ("memory_20250818", "memory", "new_path"),
    ],
)
async def test_tools_that_the_client_runs_are_shown_with_their_schema(
    tool_model: Path, kind: str, name: str, parameter: str
) -> None:
    (prompt,) = await prompts(tool_model, {"tools": [{"type": kind, "name": name}]})
    assert f'"name": "{name}"' in prompt
    assert parameter in prompt


async def test_turns_that_anthropics_servers_answered_are_continued(tool_model: Path) -> None:
    """Checks tool references as a tool search returns them, and a web search with its result."""
    turns = [
        *ASK,
        {
            "role": "assistant",
            "content": [
                {"type": "server_tool_use", "id": "srvtoolu_1", "name": "web_search", "input": {"query": "weather"}},
                {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_1", "content": [{"type": "x"}]},
                {"type": "text", "text": "It is sunny.", "citations": [{"type": "web_search_result_location"}]},
                {"type": "tool_use", "id": "toolu_1", "name": "ToolSearch", "input": {"query": "calendar"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "toolu_1",
                    "content": [{"type": "tool_reference", "tool_name": "calendar_add"}],
                }
            ],
        },
    ]
    (prompt,) = await prompts(tool_model, {"messages": turns, "tools": [OWN]})
    assert "assistant\nIt is sunny.<tool_call>" in prompt
    assert "tool\nThe tool calendar_add is available." in prompt


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "document", "title": "a.txt", "source": {"type": "text", "data": "hello"}}, "a.txt\nhello"),
        ({"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "hello"}]}}, "hello"),
        ({"type": "search_result", "source": "https://a", "title": "t", "content": [{"type": "text", "text": "x"}]},
         "t\nhttps://a\nx"),
    ],
)  # fmt: skip
async def test_text_documents_become_text(tool_model: Path, block: dict[str, Any], text: str) -> None:
    """Checks documents in user turns and in tool results."""
    result = {"type": "tool_result", "tool_use_id": "a", "content": [block]}
    asked, answered = await prompts(
        tool_model,
        {"messages": [{"role": "user", "content": [block]}]},
        {"messages": [{"role": "user", "content": [result]}]},
    )
    assert f"user\n{text}<|im_end|>" in asked
    assert f"tool\n{text}<|im_end|>" in answered


async def test_a_document_that_is_no_text_is_refused_with_a_reason(tool_model: Path) -> None:
    source = {"type": "base64", "media_type": "application/pdf", "data": "AA"}
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        body = {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "document", "source": source}]}]}
        answer = await frontend.http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    refused = "blocks of type 'document' are not supported by this server: models are given text and pictures only, not"
    assert f"{refused} documents" in answer.text


async def test_a_compaction_becomes_its_summary(tool_model: Path) -> None:
    turns = [*ASK, {"role": "assistant", "content": [{"type": "compaction", "content": "It rained."}]}, *ASK]
    (prompt,) = await prompts(tool_model, {"messages": turns})
    assert "assistant\nIt rained.<|im_end|>" in prompt


async def test_the_legacy_name_of_the_output_format_works(tool_model: Path) -> None:
    form = {"type": "json_schema", "schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}
    async with tool_server(tool_model, '{"ok": true}') as (frontend, _, script):
        for fields in ({"output_format": form}, {"output_config": {"format": form}}, {}):
            body = {"max_tokens": 50, "messages": ASK, **fields}
            assert (await frontend.http.post("/v1/messages", json=body)).status_code == 200
    older, newer, none = (submission.sampling.structured_output for submission in script.submissions)
    assert older == newer != none
