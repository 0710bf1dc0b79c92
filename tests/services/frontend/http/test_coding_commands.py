"""Coding assistants from npm, unchanged: each reads a file with a tool, sees a command fail, and finishes its task."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.programs import answered
from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import tool_model_folder, tool_server

PACKAGES = "@openai/codex @anthropic-ai/claude-code opencode-ai"
TASK = "Look at shop.py."
CODEX = """
model = "talking"
model_provider = "q"
[model_providers.q]
name = "q"
base_url = "{url}/v1"
env_key = "KEY"
wire_api = "responses"
"""


@dataclass(frozen=True)
class Command:
    """How an assistant is started, and its tool calls to read a file and to run a failing command."""

    arguments: tuple[str, ...]
    calls: tuple[Mapping[str, Any], Mapping[str, Any]]
    environment: Callable[[Path, str], Mapping[str, str]]


def codex(home: Path, url: str) -> Mapping[str, str]:
    (home / "config.toml").write_text(CODEX.format(url=url))
    return {"CODEX_HOME": str(home), "KEY": "none"}


def claude(_: Path, url: str) -> Mapping[str, str]:
    models = dict.fromkeys(("ANTHROPIC_MODEL", "ANTHROPIC_SMALL_FAST_MODEL"), "talking")
    quiet = dict.fromkeys(("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "DISABLE_AUTOUPDATER"), "1")
    more = {"ANTHROPIC_BASE_URL": url, "ANTHROPIC_AUTH_TOKEN": "none", "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "2000"}
    return {**models, **quiet, **more}


def opencode(home: Path, url: str) -> Mapping[str, str]:
    model = {"name": "talking", "reasoning": True, "tool_call": True, "limit": {"context": 200000, "output": 2000}}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "q",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {"talking": model},
    }
    chosen = {"model": "q/talking", "small_model": "q/talking", "provider": {"q": provider}}
    (home / "opencode.json").write_text(json.dumps({**chosen, "autoupdate": False, "share": "disabled"}))
    return {"OPENCODE_CONFIG": str(home / "opencode.json")}


COMMANDS = {
    "codex": Command(
        ("exec", "--skip-git-repo-check", "-s", "read-only", TASK),
        (
            {"name": "exec_command", "arguments": {"cmd": "cat shop.py"}},
            {"name": "exec_command", "arguments": {"cmd": "cat nothing"}},
        ),
        codex,
    ),
    "claude": Command(
        ("-p", TASK, "--max-turns", "6", "--allowedTools", "Read,Bash"),
        (
            {"name": "Bash", "arguments": {"command": "cat shop.py", "description": "Reads"}},
            {"name": "Bash", "arguments": {"command": "cat nothing", "description": "Reads"}},
        ),
        claude,
    ),
    "opencode": Command(
        ("run", TASK),
        (
            {"name": "bash", "arguments": {"command": "cat shop.py", "description": "Reads"}},
            {"name": "bash", "arguments": {"command": "cat nothing", "description": "Reads"}},
        ),
        opencode,
    ),
}


def program(name: str) -> str:
    found = Path(os.environ.get("TEST_NODE_MODULES", "")) / ".bin" / name
    if not found.is_file():
        pytest.skip(f"needs TEST_NODE_MODULES=FOLDER/node_modules: npm install {PACKAGES}")
    return str(found)


@pytest.mark.parametrize("name", COMMANDS)
async def test_a_task_with_two_calls_ends(tmp_path: Path, name: str) -> None:
    path, command = program(name), COMMANDS[name]
    home, work = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    work.mkdir()
    (work / "shop.py").write_text("def total(prices):\n    return sum(price)\n")

    def said(prompt: str) -> str:
        number = prompt.count("<|im_start|>tool\n")
        if f'"name": "{command.calls[0]["name"]}"' not in prompt or number == 2:
            return "<think>\nNow I know.\n</think>\n\nDone."
        return f"<think>\nI look.\n</think>\n\nSo.\n<tool_call>\n{json.dumps(command.calls[number])}\n</tool_call>"

    folder = tool_model_folder(tmp_path / "talking")
    async with tool_server(folder, said, max_model_len=400_000) as (frontend, _, script):
        places = {"HOME": str(home), "PATH": os.environ["PATH"], "TERM": "dumb"}
        settings = {**places, **command.environment(home, frontend.url)}
        start = ["env", "-i", "-C", str(work), *(f"{key}={value}" for key, value in settings.items())]
        without_input = ["sh", "-c", 'exec "$@" < /dev/null', "sh"]
        status, out, err = await answered(*start, *without_input, path, *command.arguments)
        assert status == 0, err
        last = prompt_text(folder, prompt_of(script.submissions[-1]))
        metrics = await frontend.metrics()
    assert out.rstrip().endswith("Done.")
    assert "return sum(price)" in last
    assert "nothing: No such file or directory" in last
    assert not any("unknown_request_fields" in key for key in metrics)
