"""Conversations of coding assistants with a model that reasons and calls tools; both are sent back unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.services.frontend.http.fields.unknown_fields import OTHER
from tests.coding_clients.replay import NAMES, load, replay
from tests.services.frontend.tool_model import tool_model_folder, tool_server

CALLS = {"claude_code": "Bash", "codex": "shell", "opencode": "bash", "cline": "read_file"}


def says(name: str) -> str:
    """Returns the model's output: reasoning, text, and a tool call if the client offers tools."""
    call = f'<tool_call>\n{{"name": "{CALLS[name]}", "arguments": {{"command": ["ls"]}}}}\n</tool_call>'
    return f"<think>\nI look.\n</think>\n\nLet me see.\n{call}\n{call}"


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.mark.parametrize("name", sorted(CALLS))
async def test_reasoning_and_calls_come_in_order_and_go_back(tool_model: Path, name: str) -> None:
    def said(prompt: str) -> str:
        has_tools = f'"name": "{CALLS[name]}"' in prompt.partition("<|im_end|>")[0]
        return says(name) if has_tools else "<think>\nI look.\n</think>\n\nDone."

    async with tool_server(tool_model, said, max_model_len=32768) as (frontend, _, script):
        frontend.write_each_token(script)
        limit = "max_output_tokens" if name == "codex" else "max_tokens"
        answers = await replay(name, frontend.http, model="talking", **{limit: 400})
        metrics = await frontend.metrics()
    assert {answered.reasoning for answered in answers} <= {"", "I look."}
    assert any(answered.reasoning for answered in answers)
    assert {answered.text for answered in answers} <= {"Done.", "Let me see.", "Let me see.\n"}
    num_calls = max(len(answered.calls) for answered in answers)
    assert num_calls == (1 if name in ("cline", "codex") else 2), "one call where the client allows no parallel ones"
    assert metrics.get(f"quire_unknown_request_fields_total{{field={OTHER}}}", 0) <= 2 * len(load(name)["turns"])


def test_each_conversation_says_where_its_form_is_from() -> None:
    assert {"aider", "claude_code", "cline", "codex", "opencode"} == set(NAMES)
    for name in NAMES:
        session = load(name)
        assert "Forms: " in session["about"]
        assert len(session["turns"]) >= 4
        assert all("about" in turn for turn in session["turns"])
