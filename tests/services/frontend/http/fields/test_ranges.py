"""The OpenAPI document and the server agree on the range of every field, including its limits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from quire.services.frontend.http.fields import ranges
from quire.services.frontend.request.scalar_parameters import MAX_REPETITION_PENALTY, MAX_TOP_K
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import WEATHER, tool_model_folder

SAID = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "name": "f"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": SAID, "max_tokens": 2},
    "/v1/chat/completions/batch": {"messages": [SAID], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/messages": {"messages": SAID, "max_tokens": 2},
    "/v1/embeddings": {"input": "hi"},
    "/pooling": {"input": "hi"},
    "/score": {"queries": "a", "documents": ["b"]},
    "/rerank": {"query": "a", "documents": ["b"]},
    "/v2/embed": {"texts": ["hi"]},
    "/tokenize": {"prompt": "hi"},
    "/detokenize": {"tokens": [1]},
    "/api/chat": {"messages": SAID, "options": {"num_predict": 2}},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2}},
    "/api/embeddings": {"prompt": "hi"},
    "/generate": {"text": "hi", "sampling_params": {"max_new_tokens": 2}},
    "/v2/models/talking/infer": {
        "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}],
        "parameters": {"max_tokens": 2},
    },
}
PLACES = {"/v2/models/talking/infer": "/v2/models/{name}/infer"}  # in the document

TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["hi"]}
# (messages before the tested one, whether they are valid)
PART = {"type": "input_text", "text": "so"}
CALL = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}
ITEMS: list[tuple[dict[str, Any], bool]] = [
    ({"role": "user", "content": [PART, {"type": "refusal", "refusal": "no"}]}, True),
    ({"role": "user"}, True),
    ({"content": "hi"}, False),
    ({"role": "tool", "content": "hi"}, False),
    ({"role": "user", "content": [{"text": "hi"}]}, False),
    ({"role": "user", "content": [{"type": "input_image", "text": "hi"}]}, False),
    ({"role": "user", "content": [{"type": "refusal", "text": "hi"}]}, False),
    (CALL, True),
    ({**CALL, "arguments": {}}, True),
    ({"type": "function_call", "arguments": "{}"}, False),
    ({"type": "function_call_output", "call_id": "a", "output": [PART]}, True),
    ({"type": "function_call_output", "call_id": "a"}, True),
    ({"type": "reasoning", "summary": [{"text": "so"}], "content": None}, True),
    ({"type": "reasoning", "summary": []}, True),
    ({"type": "reasoning", "content": ["so"]}, False),
    ({"type": "reasoning", "content": [{"text": 5}]}, False),
    ({"type": "web_search_call"}, True),
]
RESULT = {"type": "tool_result", "tool_use_id": "a", "content": [{"type": "text", "text": "sunny"}]}
USE = {"type": "tool_use", "id": "a", "name": "f", "input": {}}
TURNS: list[tuple[dict[str, Any], bool]] = [
    ({"role": "user", "content": [{"text": "hi"}]}, False),
    ({"role": "user", "content": [{"type": "image", "text": "hi"}]}, False),
    ({"role": "user", "content": [{"type": "text"}]}, False),
    ({"role": "user", "content": [RESULT]}, True),
    ({"role": "user", "content": [{**RESULT, "content": 5}]}, False),
    ({"role": "user", "content": [{**RESULT, "content": [{"type": "image"}]}]}, False),
    ({"role": "assistant", "content": [USE]}, True),
    ({"role": "assistant", "content": [{**USE, "name": ""}]}, False),
    ({"role": "assistant", "content": [RESULT]}, False),
    ({"role": "user", "content": [USE]}, False),
]

GENERATED: dict[str, tuple[list[Any], list[Any]]] = {  # what is allowed, and what is not
    "n": ([1, None], [0, 16385]),
    "temperature": ([0, 2, None], [-0.1, 2.1]),
    "top_p": ([1, 1e-9], [0, 1.1, -1]),
    "top_k": ([-1, 0, MAX_TOP_K, 2 * MAX_TOP_K], [-2]),
    "min_p": ([0, 1], [-0.1, 1.1]),
    "seed": ([-(2**63), 2**63 - 1], [2**63, -(2**63) - 1]),
    "repetition_penalty": ([1 / MAX_REPETITION_PENALTY, MAX_REPETITION_PENALTY], [0, 5e-324, 1e300]),
    "presence_penalty": ([-2, 2], [-2.1, 2.1]),
    "frequency_penalty": ([-2, 2], [-2.1, 2.1]),
    "top_n_sigma": ([0, 3], [-1]),
    "min_tokens": ([0], [-1]),
    "thinking_token_budget": ([-1], [-2, 2**31]),
    "truncate_prompt_tokens": ([-1, 1, None], [0, -2]),
    "stop": (["x", ["x"], [], None], [[""]]),
    "bad_words": ([["x"], []], [[""], ["x"] * 129]),
    "stop_token_ids": ([[0], []], [[-1]]),
    "allowed_token_ids": ([[0]], [[], [-1]]),
    "logprob_token_ids": ([[]], [[0] * 129]),
    "priority": ([0, None], [2**31, -(2**31) - 1]),
    "guided_choice": ([["a"]], [[], [""]]),
    "structured_outputs": ([{"choice": ["a"]}], [{}, {"choice": []}, {"regex": "a", "choice": ["a"]}]),
    "stream_options": ([None], [{"include_usage": True}]),
    "retention_s": ([None], [5]),
}
OTHERS: list[tuple[str, dict[str, Any], bool]] = [
    ("/v1/completions", {"prompt": ""}, False),
    ("/v1/completions", {"prompt": []}, False),
    ("/v1/completions", {"prompt": ["hi", ""]}, False),
    ("/v1/completions", {"prompt": [[1], []]}, False),
    ("/v1/completions", {"prompt": [[1], [2]]}, True),
    ("/v1/completions", {"prompt": [-1]}, False),
    ("/v1/chat/completions", {"messages": [{"role": "robot", "content": "hi"}]}, False),
    ("/v1/chat/completions", {"messages": [{"content": "hi"}]}, False),
    ("/v1/chat/completions", {"messages": [{"role": "developer", "content": "hi"}]}, True),
    ("/v1/completions", {"logit_bias": {"x": 1}}, False),
    ("/v1/completions", {"logit_bias": {"5": 1}}, True),
    ("/v1/chat/completions", {"chat_template": "{{ messages }}"}, False),
    ("/v1/chat/completions", {"chat_template": None}, True),
    ("/v1/chat/completions", {"top_logprobs": 1}, False),
    ("/v1/chat/completions", {"top_logprobs": 1, "logprobs": True}, True),
    ("/v1/chat/completions", {"tools": [WEATHER]}, True),
    ("/v1/chat/completions", {"tools": []}, True),
    ("/v1/chat/completions", {"tools": [], "tool_choice": "auto"}, True),
    ("/v1/chat/completions", {"tools": [], "tool_choice": "required"}, False),
    ("/v1/chat/completions", {"tools": [{"type": "function"}]}, False),
    ("/v1/chat/completions", {"tools": [{"type": "mcp", "function": {"name": "f"}}]}, False),
    ("/v1/chat/completions", {"tools": [{"function": {"name": ""}}]}, False),
    ("/v1/chat/completions", {"tool_choice": "auto"}, True),
    ("/v1/chat/completions", {"tool_choice": "none"}, True),
    ("/v1/chat/completions", {"tools": [WEATHER], "tool_choice": "sometimes"}, False),
    ("/v1/chat/completions", {"tools": [WEATHER], "tool_choice": {"type": "function"}}, False),
    *(
        (
            "/v1/chat/completions",
            {
                "tools": [WEATHER],
                "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": tools}},
            },
            good,
        )
        for tools, good in [([WEATHER], True), ([None], False), (5, False), ([{"function": {"name": {}}}], False)]
    ),
    ("/v1/chat/completions/batch", {"tools": [WEATHER]}, False),
    ("/v1/chat/completions/batch", {"n": 2}, False),
    ("/v1/chat/completions/batch", {"stream": True}, False),
    ("/v1/chat/completions/batch", {"messages": [[]]}, False),
    ("/v1/responses", {"input": []}, False),
    ("/v1/responses", {"include": ["nonsense"]}, False),
    ("/v1/responses", {"tools": [{"type": "web_search"}]}, True),
    ("/v1/responses", {"tools": [TOOL]}, True),
    ("/v1/responses", {"tool_choice": "required"}, False),
    ("/v1/responses", {"tool_choice": "auto", "tools": []}, True),
    ("/v1/responses", {"tools": [TOOL], "tool_choice": "sometimes"}, False),
    ("/v1/responses", {"tools": [TOOL], "tool_choice": {"type": "function"}}, False),
    ("/v1/responses", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, True),
    *(
        (
            "/v1/responses",
            {"tools": [TOOL], "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": tools}},
            good,
        )
        for tools, good in [([TOOL], True), ([None], False), ([], False), (5, False), ([{"name": {}}], False)]
    ),
    ("/v1/completions", {"resumable": True}, False),
    ("/v1/completions", {"resumable": True, "stream": True}, True),
    ("/v1/chat/completions", {"resumable": True, "stream": None}, False),
    *(("/v1/responses", {"input": [item, *SAID]}, good) for item, good in ITEMS),
    *(("/v1/messages", {"messages": [said, *SAID]}, good) for said, good in TURNS),
    ("/v1/messages", {"system": [{"text": "hi"}]}, False),
    ("/v1/messages", {"system": [{"type": "text", "text": "hi"}]}, True),
    ("/v1/responses", {"background": True, "store": False}, False),
    ("/v1/responses", {"prompt": 0}, True),
    ("/v1/messages", {"top_p": 0}, False),
    ("/v1/messages", {"tool_choice": {"type": "sometimes"}}, False),
    ("/v1/messages", {"tool_choice": {"type": "any"}}, False),
    ("/v1/messages", {"tools": [{"name": "f"}], "tool_choice": {"type": "tool"}}, False),
    ("/v1/messages", {"stop_sequences": [""]}, False),
    ("/v1/messages", {"tools": [{"name": "f", "input_schema": {}}], "tool_choice": {"type": "none"}}, True),
    ("/v1/messages", {"tools": [{"type": "bash_20250124", "name": "bash"}]}, True),
    ("/v1/embeddings", {"input": ""}, False),
    ("/v1/embeddings", {"truncate_prompt_tokens": 0}, False),
    *(("/v1/embeddings", {"dimensions": value}, good) for value, good in [(2, True), (0, False), (2**20 + 1, False)]),
    *(("/v1/embeddings", {"pooler": pooler}, True) for pooler in ("last", "mean", "cls", None)),
    *(("/v1/embeddings", {"pooler": pooler}, False) for pooler in ("all", "step", "sum")),
    ("/pooling", {"pooler": "last"}, True),
    ("/pooling", {"pooler": "sum"}, False),
    ("/v2/embed", {"output_dimension": 0}, False),
    ("/v2/embed", {"output_dimension": 2**20 + 1}, False),
    ("/v2/embed", {"output_dimension": 2}, True),
    ("/score", {"text_1": "a"}, False),
    ("/score", {"queries": None}, False),
    ("/score", {"documents": []}, False),
    ("/rerank", {"documents": [""]}, False),
    ("/v2/embed", {"texts": None}, False),
    ("/v2/embed", {"texts": [""]}, False),
    ("/v2/embed", {"truncate": "NONE", "max_tokens": 3}, False),
    ("/tokenize", {"prompt": None}, False),
    ("/tokenize", {"messages": []}, False),
    ("/detokenize", {"tokens": [-1]}, False),
    ("/api/chat", {"messages": [{}]}, False),
    ("/api/chat", {"messages": [], "options": {"temperature": 3}}, False),
    ("/api/chat", {"options": {"num_predict": 0}}, False),
    ("/api/chat", {"options": {"num_predict": -3}}, False),
    ("/api/chat", {"width": 0}, True),
    ("/api/generate", {"raw": True, "system": "be brief"}, False),
    ("/api/generate", {"prompt": "", "options": {"seed": 2**63}}, False),
    ("/api/embeddings", {"prompt": ""}, False),
    ("/api/embeddings", {"options": {"top_p": 2}}, False),
    ("/generate", {"input_ids": [1]}, False),
    ("/generate", {"text": None}, False),
    ("/generate", {"text": ""}, False),
    ("/generate", {"text": None, "input_ids": [[1], []]}, False),
    ("/generate", {"priority": -(2**31)}, False),
    ("/v2/models/talking/infer", {"inputs": []}, False),
    (
        "/v2/models/talking/infer",
        {"inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}]},
        False,
    ),
    *(
        ("/v2/models/talking/infer", {"inputs": [{**TEXT, **change}]}, good)
        for change, good in [
            ({}, True),
            ({"shape": []}, True),
            ({"datatype": "BOOL"}, False),
            ({"shape": [2]}, False),
            ({"data": None}, False),
        ]
    ),
]


def cases() -> Iterator[tuple[str, dict[str, Any], bool]]:
    yield from ((path, {}, True) for path in BODIES)
    for name, (allowed, forbidden) in GENERATED.items():
        yield from (("/v1/completions", {name: value}, True) for value in allowed)
        yield from (("/v1/completions", {name: value}, False) for value in forbidden)
    yield from OTHERS


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


async def test_the_document_and_the_server_say_the_same_of_values(frontend: Running) -> None:
    document = (await frontend.http.get("/openapi.json")).json()
    differ = []
    for path, changes, is_good in cases():
        body = {**BODIES[path], **changes}
        place = document["paths"][PLACES.get(path, path)]["post"]["requestBody"]["content"]["application/json"]
        schema = {**place["schema"], "components": document["components"]}
        allowed = Draft202012Validator(schema).is_valid(body)
        answer = await frontend.http.post(path, json=body)
        if (allowed, answer.status_code) != (is_good, 200 if is_good else 400):
            differ.append((path, changes, allowed, answer.status_code, answer.text[:200]))
    assert not differ, "\n".join(map(str, differ))


def test_every_range_is_tried_on_some_body() -> None:
    tried = {*GENERATED, *(name for _, changes, _ in OTHERS for name in changes)}
    same = {  # other bodies' names of the tested fields
        *(
            "input_ids",
            "logprobs",
            "num_predict",
            "max_completion_tokens",
            "max_new_tokens",
            "max_output_tokens",
            "min_new_tokens",
        ),
        *("prompt_logprob_start", "prompt_logprobs", "repeat_penalty", "sampling_seed", "token_ids_logprob", "tokens"),
    }
    assert set(ranges.FIELDS) - tried <= same


async def test_limits_of_lists_and_purposes_of_files_are_in_the_document(frontend: Running) -> None:
    document = (await frontend.http.get("/openapi.json")).json()
    for path in ("/v1/files", "/v1/batches"):
        parameters = {one["name"]: one["schema"] for one in document["paths"][path]["get"]["parameters"]}
        assert (parameters["limit"]["minimum"], parameters["limit"]["maximum"]) == (1, 10_000)
    form = document["paths"]["/v1/files"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    assert "batch" in form["properties"]["purpose"]["enum"]
