"""Requests as clients of other servers send them, with the expected status and error format."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

HALF = "\ud83d"
SAID = [{"role": "user", "content": "hi"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "talking", "prompt": "hi", "max_tokens": 3},
    "/v1/chat/completions": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/v1/responses": {"model": "talking", "input": "hi", "max_output_tokens": 3},
    "/v1/messages": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/v1/messages/count_tokens": {"model": "talking", "messages": SAID},
    "/tokenize": {"model": "talking", "prompt": "x"},
    "/detokenize": {"model": "talking", "tokens": [1]},
}
SHORTER: dict[str, dict[str, Any]] = {
    "/v1/embeddings": {"input": "hi"},
    "/v2/embed": {"texts": ["hi"]},
    "/api/generate": {"prompt": "hi", "stream": False, "options": {"num_predict": 3}},
}
LONG = "hi " * 400  # tokens enough, few enough characters
SCHEMA = {"type": "nonsense"}


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


async def refused(frontend: Running, path: str, **changes: Any) -> tuple[str | None, str, Any]:
    """Returns field, message and code of a 400."""
    answer = await frontend.http.post(path, content=json.dumps({**BODIES[path], **changes}))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    return error.get("param"), error["message"], error.get("code")


@pytest.mark.parametrize("path", BODIES)
async def test_a_lone_surrogate_is_named_wherever_it_occurs(frontend: Running, path: str) -> None:
    _, message, _ = await refused(frontend, path, model=HALF)
    assert message == "model holds \\ud83d, half of a surrogate pair, which is not valid text."
    deep = {"a": [{"b": f"x{HALF}"}]}
    _, message, _ = await refused(frontend, path, chat_template_kwargs=deep)
    assert message.startswith("chat_template_kwargs.a[0].b holds \\ud83d")
    _, message, _ = await refused(frontend, path, **{"x\udc00y": 1})
    assert "holds \\udc00" in message
    await frontend.until_idle()


@pytest.mark.parametrize("path", BODIES)
async def test_half_of_a_pair_is_named_however_the_body_is_encoded(frontend: Running, path: str) -> None:
    as_bytes = json.dumps({**BODIES[path], "model": HALF}, ensure_ascii=False).encode(errors="surrogatepass")
    in_two_bytes = json.dumps({**BODIES[path], "model": HALF}).encode("utf-16")
    for body in (as_bytes, in_two_bytes):
        answer = await frontend.http.post(path, content=body)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("model holds \\ud83d")


async def test_complete_surrogate_pairs_are_text(frontend: Running) -> None:
    body = {**BODIES["/v1/completions"], "prompt": "\N{GRINNING FACE}"}
    answer = await frontend.http.post("/v1/completions", content=json.dumps(body, ensure_ascii=True))
    assert answer.status_code == 200


@pytest.mark.parametrize(
    ("path", "changes", "field"),
    [
        ("/v1/completions", {"prompt": LONG}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/v1/responses", {"input": LONG}, "input"),
        ("/v1/completions", {"prompt": LONG * 50}, "prompt"),
        ("/v1/responses", {"input": LONG * 50}, "input"),
        ("/v1/completions", {"max_tokens": 5_000_000}, "max_tokens"),
        ("/v1/responses", {"max_output_tokens": 5_000_000}, "max_output_tokens"),
    ],
)
async def test_what_is_too_long_has_the_code_that_clients_look_for(
    frontend: Running, path: str, changes: dict[str, Any], field: str
) -> None:
    found, message, code = await refused(frontend, path, **changes)
    assert (found, code) == (field, "context_length_exceeded")
    assert "maximum context length is 512 tokens" in message


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/completions", {"model": None, "echo": None}),
        ("/v1/chat/completions", {"model": None, "echo": None}),
        ("/v1/responses", {"model": None, "background": None}),
        ("/tokenize", {"model": None}),
    ],
)
async def test_null_is_a_field_that_was_left_out(frontend: Running, path: str, changes: dict[str, Any]) -> None:
    answer = await frontend.http.post(path, json={**BODIES[path], **changes})
    assert answer.status_code == 200, answer.text
    assert answer.json().get("model", "talking") == "talking"


@pytest.mark.parametrize(
    ("path", "changes", "field", "text"),
    [
        ("/v1/responses", {"max_output_tokens": -3}, "max_output_tokens", "max_output_tokens must be at least 1"),
        ("/v1/responses", {"input": []}, "input", "input must contain at least one"),
        (
            "/v1/chat/completions",
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
            "response_format",
            "response_format: it cannot be compiled",
        ),
        ("/v1/completions", {"guided_json": SCHEMA}, "guided_json", "guided_json: it cannot be compiled"),
        ("/v1/completions", {"structured_outputs": {"json": SCHEMA}}, "structured_outputs", "structured_outputs: it"),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}},
            "text.format",
            "text.format: it cannot be compiled",
        ),
        ("/v1/messages", {"stop_sequences": [""]}, None, "stop_sequences"),
        ("/v1/completions", {"logit_bias": {"7": 1, "seven": 2}}, "logit_bias", "'seven' is not a token id"),
        ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "x"}]}, "messages", "got 'robot'"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
            "messages",
            "content of type 'text' needs its text in 'text'",
        ),
        ("/v1/completions", {"thinking_token_budget": 2**32}, "thinking_token_budget", "at most 2^31 - 1"),
        ("/v1/completions", {"thinking_token_budget": 1e20}, "thinking_token_budget", "integer"),
        ("/v1/completions", {"max_tokens": 1e30}, "max_tokens", "integer"),
        ("/v1/completions", {"max_tokens": -0.0}, "max_tokens", "at least 1"),
        ("/v1/completions", {"best_of": 3}, "best_of", "best_of must be n=1"),
        ("/v1/completions", {"guided_json": {}, "guided_regex": "a"}, "guided_json", "send one constraint"),
        ("/v1/completions", {"prompt": ""}, "prompt", "it is empty"),
    ],
)
async def test_errors_name_what_was_sent(
    frontend: Running, path: str, changes: dict[str, Any], field: str | None, text: str
) -> None:
    found, message, _ = await refused(frontend, path, **changes)
    assert found == field
    assert text in message


@pytest.mark.parametrize(
    ("path", "changes", "field"),
    [
        ("/v1/completions", {"suffix": "x"}, "suffix"),
        ("/v1/completions", {"kv_transfer_params": {"a": 1}}, "kv_transfer_params"),
        ("/v1/chat/completions", {"functions": [{"name": "f"}]}, "functions"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
        ("/v1/responses", {"conversation": "c"}, "conversation"),
    ],
)
async def test_what_is_not_offered_is_the_clients_to_change(
    frontend: Running, path: str, changes: dict[str, Any], field: str
) -> None:
    """Clients would retry a 5xx again and again."""
    found, message, code = await refused(frontend, path, **changes)
    assert (found, code) == (field, "not_offered")
    assert "not supported" in message


async def test_older_names_mean_what_the_newer_do(frontend: Running, tmp_path: Path) -> None:
    for changes in ({"best_of": 1}, {"guided_json": {"type": "object"}}, {"guided_choice": ["a", "b"]}):
        answer = await frontend.http.post("/v1/completions", json={**BODIES["/v1/completions"], **changes})
        assert answer.status_code == 200
    for changes in ({"max_tool_calls": 3}, {"truncation": "auto", "input": LONG}):
        answer = await frontend.http.post("/v1/responses", json={**BODIES["/v1/responses"], **changes})
        assert answer.status_code == 200


async def test_invalid_json_is_reported_with_its_position(frontend: Running) -> None:
    for path in ("/v1/completions", "/v1/messages"):
        answer = await frontend.http.post(path, content=b'{"model": "talking", x')
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert "the body is not JSON" in error["message"]
        assert "at character 21" in error["message"]
        assert error.get("param") is None


async def test_a_body_of_another_kind_is_named(frontend: Running) -> None:
    content = json.dumps(BODIES["/v1/completions"])
    for kind, status in (("text/plain", 400), ("application/json; charset=utf-8", 200), ("application/x+json", 200)):
        answer = await frontend.http.post("/v1/completions", content=content, headers={"content-type": kind})
        assert answer.status_code == status
        if status == 400:
            assert "content-type is 'text/plain'" in answer.json()["error"]["message"]


async def test_what_was_not_asked_for_is_null(frontend: Running) -> None:
    plain = (await frontend.http.post("/v1/completions", json=BODIES["/v1/completions"])).json()["choices"][0]
    assert {name: plain[name] for name in ("prompt_logprobs", "token_ids", "prompt_token_ids")} == dict.fromkeys(
        ("prompt_logprobs", "token_ids", "prompt_token_ids")
    )
    chat = (await frontend.http.post("/v1/chat/completions", json=BODIES["/v1/chat/completions"])).json()
    assert chat["prompt_logprobs"] is None
    assert chat["prompt_token_ids"] is None
    assert chat["choices"][0]["token_ids"] is None


async def test_text_offsets_are_those_of_the_echoed_text(frontend: Running) -> None:
    special = min(frontend.frontend.model.tokenizer.special_ids)
    body = {**BODIES["/v1/completions"], "prompt": [70, special, 71], "echo": True, "logprobs": 1}
    choice = (await frontend.http.post("/v1/completions", json=body)).json()["choices"][0]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert offsets[:4] == [0, 1, 1, 2], "the second token is special, and left out of the text"
    for offset, token in zip(offsets, tokens, strict=True):
        if not token.startswith(("bytes:", "<|")):
            assert choice["text"][offset:].startswith(token)


@pytest.mark.parametrize(
    ("path", "ignored_fields", "not_offered"),
    [
        ("/v1/completions", "user", "suffix"),
        ("/v1/embeddings", "user", "audio"),
        ("/v1/responses", "user", "conversation"),
        ("/v1/messages", "metadata", "container"),
        ("/api/generate", "keep_alive", "suffix"),
    ],
)
async def test_the_document_knows_all_fields_of_a_body(
    frontend: Running, path: str, ignored_fields: str, not_offered: str
) -> None:
    """Including fields without effect and fields with refused values."""
    body = {**BODIES, **SHORTER}[path]
    document = (await frontend.http.get("/openapi.json")).json()
    place = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][place.rpartition("/")[2]]
    assert schema["additionalProperties"] is True
    assert not ignored_fields or "type" not in schema["properties"][ignored_fields]
    assert None in schema["properties"][not_offered]["enum"]
    null = {not_offered: None, **({ignored_fields: None} if ignored_fields else {})}
    assert (await frontend.http.post(path, json={**null, **body})).status_code == 200


async def test_the_document_names_bodies_and_no_modules(frontend: Running) -> None:
    """Two bodies with the same name would get module-qualified names."""
    schemas = (await frontend.http.get("/openapi.json")).json()["components"]["schemas"]
    assert {"ChatBody", "OllamaChatBody", "NewBatchBody", "ChatBatchBody"} <= schemas.keys()
    assert [name for name in schemas if "__" in name] == []


async def test_the_document_names_every_status_and_no_other(frontend: Running) -> None:
    document = (await frontend.http.get("/openapi.json")).json()
    for path, operations in document["paths"].items():
        for operation in operations.values():
            assert "422" not in operation["responses"]
            assert {"400", "401", "403", "404", "413", "429", "500", "503"} <= operation["responses"].keys(), path
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"):
        answers = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert "properties" in answers["application/json"]["schema"]
        assert "text/event-stream" in answers


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        ("/v1/chat/completions", {"tools": [{"type": "x" * 500_000}]}),
        ("/v1/chat/completions", {"messages": [{"role": "x" * 500_000, "content": "x"}]}),
        ("/v1/completions", {"logit_bias": {"x" * 500_000: "y"}}),
        ("/v1/completions", {"model": "x" * 500_000}),
        ("/v1/completions", {"truncation_side": "x" * 500_000}),
        ("/v1/responses", {"previous_response_id": "x" * 500_000}),
        ("/v1/messages", {"tool_choice": {"type": "x" * 500_000}, "tools": [{"name": "f", "input_schema": {}}]}),
    ],
)
async def test_what_is_wrong_comes_back_shortened(frontend: Running, path: str, changes: dict[str, Any]) -> None:
    answer = await frontend.http.post(path, json={**BODIES[path], **changes})
    assert answer.status_code in (400, 404)
    assert len(answer.content) < 8192


async def test_bodies_in_chunks_are_read(frontend: Running) -> None:
    body = json.dumps(BODIES["/v1/completions"]).encode()

    async def pieces() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 7):
            yield body[at : at + 7]

    for headers in ({}, {"content-encoding": "identity"}):
        answer = await frontend.http.post("/v1/completions", content=pieces(), headers=headers)
        assert answer.status_code == 200


@pytest.mark.parametrize(
    ("value", "text"),
    [(b"1" * 5000, "4300 digits"), (b'"\xff"', "'utf-8' codec can't decode byte 0xff"), (b'"\xed"', "can't decode")],
)
async def test_unparsable_tool_calls_are_reported_with_a_reason(frontend: Running, value: bytes, text: str) -> None:
    for path in BODIES:
        answer = await frontend.http.post(path, content=b'{"model": ' + value + b"}")
        message = answer.json()["error"]["message"]
        assert answer.status_code == 400
        assert message.startswith("the body is not JSON: ")
        assert text in message
