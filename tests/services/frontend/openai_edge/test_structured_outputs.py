"""Tests of output constraints as clients of several servers write them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.tool_model import ASK, tool_model_folder, tool_server

SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.fixture(scope="module")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tool_model_folder(tmp_path_factory.mktemp("models") / "talking")


async def form_of(folder: Path, path: str, body: dict[str, Any]) -> Any:
    """Returns the constraint that the scheduler got."""
    async with tool_server(folder, '{"a": 1}', reasoning_parser="none") as (frontend, _, script):
        answer = await frontend.http.post(path, json={"model": "talking", **body})
        assert answer.status_code == 200, answer.text
        return script.submissions[0].sampling.structured_output


@pytest.mark.parametrize(
    "form",
    [
        # llama.cpp's and TGI's clients; Fireworks and Together document the same
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "name": "answer", "strict": True, "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": None},
    ],
)
async def test_the_schema_is_enforced_in_every_form(tool_model: Path, form: dict[str, Any]) -> None:
    chat = await form_of(tool_model, "/v1/chat/completions", {"messages": ASK, "response_format": form})
    assert json.loads(chat.json_schema) == SCHEMA
    responses = await form_of(tool_model, "/v1/responses", {"input": "hi", "text": {"format": form}})
    assert json.loads(responses.json_schema) == SCHEMA


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_object", "schema": {}}])
async def test_any_object_without_a_schema(tool_model: Path, form: dict[str, Any]) -> None:
    found = await form_of(tool_model, "/v1/chat/completions", {"messages": ASK, "response_format": form})
    assert found.json_object


@pytest.mark.parametrize(
    "form", [{"type": "json_schema"}, {"type": "json_schema", "json_schema": {"type": "object", "properties": {}}}]
)
async def test_the_error_for_a_missing_schema_names_its_place(tool_model: Path, form: dict[str, Any]) -> None:
    async with tool_server(tool_model, "x") as (frontend, _, _script):
        body = {"model": "talking", "messages": ASK, "response_format": form}
        answer = await frontend.http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "response_format of type json_schema needs json_schema.schema"
