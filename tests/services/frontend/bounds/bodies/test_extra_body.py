"""An unmerged `extra_body`: its fields act as if they were in the body."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.bounds.bodies import json_body
from quire.services.frontend.bounds.bodies.extra_body import merge_extra_body
from quire.services.frontend.bounds.prompts import PromptLimit
from quire.shared.errors import InvalidArgument
from quire.shared.settings.request_limits import RequestLimits
from tests.services.frontend.scripted_replies import prompt_text
from tests.services.frontend.scripted_scheduler import prompt_of
from tests.services.frontend.tool_model import ASK, tool_model_folder, tool_server

OPEN = "<think>\n"
THINKS = {"chat_template_kwargs": {"enable_thinking": True}}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": ASK, "max_tokens": 20}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 20}),
        ("/v1/messages", {"messages": ASK, "max_tokens": 20}),
    ],
)
async def test_its_fields_act(tool_model: Path, path: str, body: dict[str, Any]) -> None:
    """Open-Historia PR 382, Codewhale PR 1480."""
    async with tool_server(tool_model, "ok") as (frontend, _, script):
        sent = {"model": "talking", **body, "extra_body": {**THINKS, "temperature": 0.25, "ttl": 5}}
        answer = await frontend.http.post(path, json=sent)
        assert answer.status_code == 200, answer.text
        wrong = await frontend.http.post(path, json={**sent, "extra_body": {"temprature": 0}})
        metrics = await frontend.metrics()
        await frontend.http.post(path, json={**sent, "extra_body": "x"})
    assert prompt_text(tool_model, prompt_of(script.submissions[0])).endswith(OPEN)
    assert script.submissions[0].sampling.temperature == 0.25
    assert metrics["quire_unknown_request_fields_total{field=ttl}"] == 1
    assert wrong.status_code == 400
    assert "temprature; did you mean 'temperature'" in wrong.text
    assert not prompt_text(tool_model, prompt_of(script.submissions[1])).endswith(OPEN)


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        ({"top_k": "x"}, "top_k"),
        ({"temperature": []}, "temperature"),
        ({"stop": {}}, "stop"),
        ({"model": {}}, "model"),
        ({"stream_options": {"include_usage": []}}, "stream_options.include_usage"),
    ],
)
async def test_an_error_in_it_names_the_field(tool_model: Path, inner: dict[str, Any], field: str) -> None:
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        sent = {"messages": ASK, "extra_body": {"model": "talking", **inner}}
        wrong = await frontend.http.post("/v1/chat/completions", json=sent)
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    assert wrong.json()["error"]["message"].startswith(f"{field}: ")


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        ("/v1/chat/completions", {"messages": ASK}, "max_tokens"),
        ("/v1/chat/completions", {"messages": ASK}, "max_completion_tokens"),
        ("/v1/completions", {"prompt": "x"}, "max_tokens"),
        ("/v1/responses", {"input": "x"}, "max_output_tokens"),
    ],
)
async def test_no_limit_is_said_by_leaving_it_out(
    tool_model: Path, path: str, body: dict[str, Any], field: str
) -> None:
    """For lmstudio, llama.cpp and Ollama, -1 means no limit."""
    async with tool_server(tool_model, "ok") as (frontend, _, _script):
        wrong = await frontend.http.post(path, json={"model": "talking", **body, field: -1})
    told = f"{field} must be at least 1, got -1; leave it out for as many as fit in the context."
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, field)
    assert wrong.json()["error"]["message"] == told


def test_fields_inside_count_before_those_outside() -> None:
    assert merge_extra_body({"a": 1, "extra_body": {"a": 2, "b": 3}}) == {"a": 2, "b": 3}
    assert merge_extra_body({"extra_body": {"extra_body": {"a": 1}}}) == {"extra_body": {"a": 1}}
    for plain in ({"a": 1}, {"extra_body": None}, {"extra_body": [1]}, "text", None):
        assert merge_extra_body(plain) == plain


LARGE: list[dict[str, Any]] = [
    {"messages": ASK * 5000},
    {"stop": ["a"] * 200},
    {"metadata": {"a": "b" * 1000}},
    {f"acme_{number}": 1 for number in range(300)},
    {"chat_template_kwargs": {"a": "b" * 2_000_000}},
]


@pytest.mark.parametrize("inner", LARGE)
def test_its_fields_have_the_bounds_of_those_outside(inner: dict[str, Any]) -> None:
    bodies = [{"messages": ASK} | inner, {"messages": ASK, "extra_body": inner}]
    refusals = []
    for body in bodies:
        with pytest.raises(InvalidArgument) as refused:
            json_body.check(body, json.dumps(body).encode(), RequestLimits())
        refusals.append(refused.value.field)
    assert refusals[0] == refusals[1]


def test_a_long_prompt_inside_is_refused_before_it_is_tokenized() -> None:
    with pytest.raises(InvalidArgument, match="in which at most 4000 characters fit"):
        json_body.check_prompt({"extra_body": {"prompt": "a" * 5000}}, PromptLimit(400, 10))
