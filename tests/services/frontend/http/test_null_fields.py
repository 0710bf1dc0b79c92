"""null means a field was omitted: serializers of many languages write it for unset fields."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import ASK, tool_model_folder


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.fixture
async def frontend(tool_model: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model, script.address) as frontend:
        yield frontend


NULLS: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # free-claude-code#1098: a client for code writes "stream": null
    ("/v1/messages", {"messages": ASK, "max_tokens": 3}, ("stream", "model", "system", "tools", "thinking")),
    # text-generation-inference#3155: null beside the rest of a chat
    (
        "/v1/chat/completions",
        {"messages": ASK, "max_tokens": 3},
        ("stream_options", "ignore_eos", "skip_special_tokens", "add_generation_prompt", "include_reasoning"),
    ),
    ("/v1/completions", {"prompt": "a", "max_tokens": 3}, ("use_beam_search", "resumable", "add_special_tokens")),
    # hebo-gateway#208: Codex writes "reasoning": null
    ("/v1/responses", {"input": "a", "max_output_tokens": 3}, ("reasoning", "ignore_eos", "skip_special_tokens")),
    ("/api/chat", {"messages": ASK, "stream": False, "options": {"num_predict": 3}}, ("model", "format", "tools")),
    (
        "/api/generate",
        {"prompt": "a", "stream": False, "options": {"num_predict": 3}},
        ("system", "raw", "template", "context", "suffix", "images"),
    ),
    ("/api/embed", {"input": "a"}, ("truncate", "dimensions", "model")),
    ("/rerank", {"query": "a", "documents": ["b"]}, ("return_documents", "top_n")),
    ("/tokenize", {"messages": ASK}, ("add_generation_prompt", "continue_final_message")),
]


@pytest.mark.parametrize(("path", "body", "names"), NULLS, ids=[path for path, _, _ in NULLS])
async def test_null_is_a_field_left_out(
    frontend: Running, path: str, body: dict[str, Any], names: tuple[str, ...]
) -> None:
    given = await frontend.http.post(path, json={**body, **dict.fromkeys(names)})
    without = await frontend.http.post(path, json=body)
    assert (given.status_code, without.status_code) == (200, 200), given.text
    assert given.json().keys() == without.json().keys()


async def test_null_keeps_the_default_of_a_stream(frontend: Running) -> None:
    """Ollama's calls stream by default, Anthropic's do not."""
    lines = await frontend.http.post("/api/generate", json={"prompt": "a", "stream": None})
    whole = await frontend.http.post("/v1/messages", json={"messages": ASK, "max_tokens": 3, "stream": None})
    options = {"stream": True, "stream_options": {"include_usage": None}, "max_tokens": 3}
    chunks = await frontend.http.post("/v1/chat/completions", json={"messages": ASK, **options})
    assert lines.headers["content-type"].startswith("application/x-ndjson")
    assert whole.json()["type"] == "message"
    assert "data: [DONE]" in chunks.text
    assert '"choices":[]' not in chunks.text


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/messages", {"messages": ASK, "max_tokens": None}, "max_tokens"),
        ("/rerank", {"query": None, "documents": ["b"]}, "query"),
        ("/v1/messages", {"messages": ASK, "max_tokens": 3, "stream": "sometimes"}, "stream"),
    ],
)
async def test_what_is_needed_cannot_be_null(frontend: Running, path: str, body: dict[str, Any], field: str) -> None:
    answer = await frontend.http.post(path, json=body)
    assert answer.status_code == 400
    assert field in answer.json()["error"]["message"]
