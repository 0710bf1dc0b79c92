"""HTTP beyond the openai package: bodies, errors, headers, small endpoints."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from quire.shared.pb.scheduler.v1 import scheduler_pb2
from quire.shared.version import VERSION
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, prompt_of, scheduler

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def script() -> AsyncIterator[ScriptedScheduler]:
    async with scheduler(ScriptedScheduler()) as started:
        yield started


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path, script: ScriptedScheduler) -> AsyncIterator[Running]:
    async with running(folder, script.address) as started:
        yield started


async def complete(frontend: Running, **body: Any) -> tuple[int, Any]:
    reply = await frontend.http.post("/v1/completions", json={"prompt": "hello", **body})
    return reply.status_code, reply.json()


def events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize(
    "body", [{"max_tokens": "2"}, {"stream": 0}, {"temperature": "1"}, {"seed": "1"}, {"echo": "false"}, {"n": 1.0}]
)
async def test_numbers_and_booleans_may_be_text(frontend: Running, body: dict[str, Any]) -> None:
    status, _ = await complete(frontend, **{"max_tokens": 2, **body})
    assert status == 200


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({"n": 0}, "n", "n must be at least 1, got 0."),
        ({"top_p": 0}, "top_p", "top_p must be in (0, 1], got 0.0."),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be at least 1, got 0."),
        ({"max_tokens": "many"}, "max_tokens", "unable to parse string as an integer ('many')"),
        ({"max_tokens": 1e30}, "max_tokens", "exceeded maximum size (1e+30)"),
        ({"stop": 5}, "stop", "stop: Input should be a valid string (5)"),
        ({"stop": ["x", 5]}, "stop", "stop: Input should be a valid string"),
        ({"stream_options": {"include_usage": "x" * 70}}, "stream_options.include_usage", "unable to interpret input"),
        ({"stream_options": {}}, "stream_options", "Stream options can only be defined when `stream=True`."),
        (
            {"stream": True, "stream_options": {"includeUsage": True}},
            "stream_options.includeUsage",
            "supplied: stream_options.includeUsage; did you mean 'stream_options.include_usage'?",
        ),
        ({"prompt": []}, "prompt", "it is empty"),
        ({"prompt": ["a", 5]}, "prompt", "prompt must be text, token ids, or a list of either"),
        ({"prompt": [5, True]}, "prompt", "prompt must be text, token ids, or a list of either"),
        ({"prompt": [100000]}, "prompt", "Token id 100000 is out of vocabulary"),
        ({"prompt": [1] * 513}, "prompt", "This model's maximum context length is 512 tokens. However, your prompt"),
        ({"max_tokens": 512}, "max_tokens", "This model's maximum context length is 512 tokens"),
        ({"logit_bias": {"x": 1}}, "logit_bias", "logit_bias must map token ids to numbers"),
        ({"logprobs": 21}, "logprobs", "Requested sample logprobs of 21, which is greater than max allowed: 20"),
        ({"cache_salt": ""}, "cache_salt", "cache_salt: String should have at least 1 character"),
        ({"cache_salt": "s" * 1025}, "cache_salt", "cache_salt must have at most 1024 characters, got 1025."),
        ({"kv_priority": "highest"}, "kv_priority", "kv_priority: Input should be 'low', 'normal' or 'high'"),
        (
            {"prompt": ["a"] * 600, "n": 2},
            "prompt",
            "at most 1024 samples in all, got 1200; send several requests, or",
        ),
        ({"temprature": 1}, "temprature", "Unrecognized request argument supplied: temprature"),
        ({"priority": 2**31}, "priority", "priority must be in [-2^31, 2^31 - 1], got 2147483648."),
        ({"tenant": "t" * 257}, "tenant", "tenant must have at most 256 characters, got 257."),
        (
            {"repetition_detection": {"min_count": 2}},
            "repetition_detection",
            "max_pattern_size must be at least min_pattern_size=1, got 0.",
        ),
        (
            {"repetition_detection": {"count": 2}},
            "repetition_detection.count",
            "Extra inputs are not permitted",
        ),
    ],
)
async def test_refusals_name_the_field(frontend: Running, body: dict[str, Any], field: str, text: str) -> None:
    status, reply = await complete(frontend, **body)
    assert status == 400
    assert text in reply["error"]["message"]
    assert reply["error"]["param"] == field
    assert reply["error"]["type"] == "BadRequestError"
    assert reply["error"]["code"] in (400, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"suffix": "x"}, "suffix"),
        ({"priority": 3}, "priority"),
    ],
)
async def test_what_this_server_cannot_do_is_for_clients_to_change(
    frontend: Running, body: dict[str, Any], field: str
) -> None:
    status, reply = await complete(frontend, **body)
    assert (status, reply["error"]["param"], reply["error"]["code"]) == (400, field, "not_offered")


async def test_fields_of_openai_without_effect_here_are_accepted(frontend: Running) -> None:
    status, _ = await complete(frontend, user="me", metadata={"a": "b"}, store=False, service_tier="auto", suffix=None)
    assert status == 200


async def test_other_errors_have_the_same_shape(frontend: Running) -> None:
    for method, path, status in (
        ("GET", "/nowhere", 404),
        ("GET", "/v1/completions", 405),
        ("GET", "/v1/models/other", 404),
    ):
        reply = await frontend.http.request(method, path)
        error = reply.json()["error"]
        assert (reply.status_code, error["code"]) == (status, status)
        assert set(error) == {"message", "type", "param", "code"}
    broken = await frontend.http.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert broken.status_code == 400
    assert broken.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/responses/r", "DELETE, GET, HEAD"),
        ("/v1/streams/s", "DELETE, GET, HEAD"),
        ("/v1/files", "GET, HEAD, POST"),
        ("/v1/completions", "POST"),
        ("/v1/messages", "POST"),
        ("/v1/responses/input_tokens", "POST"),  # and not those of /v1/responses/ID, which it fits as well
        ("/health", "GET, HEAD"),
    ],
)
async def test_a_wrong_method_names_the_methods_of_the_path(frontend: Running, path: str, methods: str) -> None:
    answer = await frontend.http.request("PUT", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)


@pytest.mark.parametrize(
    ("path", "status"),
    # mcp-mesh#262, omi#2985: monitors ask by HEAD; Ollama answers it on /api/tags and /api/version
    [
        ("/api/tags", 200),
        ("/api/version", 200),
        ("/v1/models", 200),
        ("/v1/models/other", 404),
        ("/health", 200),
        ("/load", 200),
        ("/v1/completions", 405),
        ("/nowhere", 404),
    ],
)
async def test_head_is_get_without_its_body(frontend: Running, path: str, status: int) -> None:
    answer, whole = await frontend.http.head(path), await frontend.http.get(path)
    assert (answer.status_code, answer.content) == (status, b"")
    assert answer.status_code == whole.status_code
    assert answer.headers.get("content-type") == whole.headers.get("content-type")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("POST", "/api/pull", 404), ("GET", "/api/chat", 405), ("PUT", "/v2/models/tiny/infer", 405)],
)
async def test_unknown_paths_are_reported_in_the_format_of_the_api(
    frontend: Running, method: str, path: str, status: int
) -> None:
    answer = await frontend.http.request(method, path)
    assert (answer.status_code, list(answer.json())) == (status, ["error"])
    assert answer.json()["error"].startswith(f"{method} {path}: ")
    assert ("allow" in answer.headers) == (status == 405)


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("POST", "/v1/messages/batches", 404, "not_found_error"),
        ("GET", "/v1/messages", 405, "invalid_request_error"),
    ],
)
async def test_unknown_paths_are_reported_in_anthropics_format(
    frontend: Running, method: str, path: str, status: int, kind: str
) -> None:
    answer = await frontend.http.request(method, path)
    error = answer.json()
    assert (answer.status_code, error["type"], error["error"]["type"]) == (status, "error", kind)
    assert error["error"]["message"].startswith(f"{method} {path}: ")


async def test_every_sampling_field_reaches_the_scheduler(frontend: Running, script: ScriptedScheduler) -> None:
    asked = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "seed": 42,
        "max_tokens": 7,
        "min_tokens": 2,
        "presence_penalty": 1.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.25,
        "top_n_sigma": 1.5,
        "logprobs": 1,
    }
    lists = {"stop_token_ids": [5, 6], "allowed_token_ids": [7, 8]}
    more = {
        "logit_bias": {"9": 2.5},
        "bad_words": ["hello"],
        "ignore_eos": True,
        "cache_salt": "s",
        "kv_priority": "high",
    }
    status, _ = await complete(frontend, **asked, **lists, **more, stop=["zzz"])
    assert status == 200
    submission = script.submissions[-1]
    sampling = submission.sampling
    assert {name: getattr(sampling, name) for name in asked} == asked
    assert {name: list(getattr(sampling, name)) for name in lists} == lists
    assert dict(sampling.logit_bias) == {9: 2.5}
    assert (sampling.n, list(sampling.stop), list(sampling.bad_words)) == (1, [], [])
    assert len(submission.params.bad_word_token_ids) == 2  # with and without the space before it
    assert submission.eos_token_ids == b""
    assert len(submission.root_hash) == 32
    assert submission.kv_priority == scheduler_pb2.KV_PRIORITY_HIGH


async def test_unseeded_prompts_get_seeds_of_their_own(frontend: Running, script: ScriptedScheduler) -> None:
    await complete(frontend, prompt=["same", "same"])
    seeds = [submission.sampling.seed for submission in script.submissions[-2:]]
    assert len(set(seeds)) == 2
    assert all(seed >= 0 for seed in seeds)


async def test_default_lengths(frontend: Running, script: ScriptedScheduler) -> None:
    await complete(frontend, prompt=[65, 66])
    await complete(frontend, prompt=[65, 66], max_tokens=None)
    await frontend.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    lengths = [submission.sampling.max_tokens for submission in script.submissions[-3:]]
    assert lengths == [16, 510, 512 - script.submissions[-1].num_prompt_tokens]


async def test_echo_repeats_the_prompt(frontend: Running) -> None:
    _, reply = await complete(frontend, prompt="hello ", echo=True, max_tokens=2)
    assert reply["choices"][0]["text"].startswith("hello h")
    _, reply = await complete(frontend, prompt=["hello", [72]], echo=True, max_tokens=0)
    ids = (await frontend.http.post("/detokenize", json={"tokens": [72]})).json()
    assert [choice["text"] for choice in reply["choices"]] == ["hello", ids["prompt"]]
    assert reply["usage"]["completion_tokens"] == 0
    streamed = await frontend.http.post(
        "/v1/completions", json={"prompt": "hello ", "echo": True, "max_tokens": 3, "stream": True}
    )
    text = "".join(chunk["choices"][0]["text"] for chunk in events(streamed.text))
    assert text.startswith("hello h")


async def test_truncated_prompts(frontend: Running, script: ScriptedScheduler) -> None:
    await complete(frontend, prompt=[1, 2, 3, 4], truncate_prompt_tokens=2, max_tokens=1)
    assert prompt_of(script.submissions[-1]) == [3, 4]


async def test_usage_in_every_chunk(frontend: Running) -> None:
    body = {"prompt": "hello world", "stream": True, "max_tokens": 3, "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": True}
    reply = await frontend.http.post("/v1/completions", json={**body, "stream_options": options})
    chunks = events(reply.text)
    by_sample = [
        chunk["usage"]["completion_tokens"]
        for chunk in chunks
        if chunk["choices"][:1] and not chunk["choices"][0]["index"]
    ]
    assert by_sample == sorted(by_sample)
    assert by_sample[-1] == 3
    assert chunks[-1]["usage"]["completion_tokens"] == 6


async def test_request_ids(frontend: Running, script: ScriptedScheduler) -> None:
    reply = await frontend.http.post("/v1/completions", json={"prompt": "x"}, headers={"x-request-id": "mine"})
    assert reply.headers["x-request-id"] == "mine"
    assert reply.json()["id"] == "cmpl-mine"
    assert script.submissions[-1].request_id == "mine"
    refused = await frontend.http.post("/v1/completions", json={"prompt": "x", "request_id": "bad", "n": 0})
    assert (refused.status_code, refused.headers["x-request-id"]) == (400, "bad")
    for name, status in (("Malmö", 200), ("body\nid", 400)):
        reply = await frontend.http.post("/v1/completions", json={"prompt": "x", "request_id": name})
        assert reply.status_code == status
        assert "x-request-id" not in reply.headers


async def test_chat_options(frontend: Running, script: ScriptedScheduler) -> None:
    messages = [{"role": "user", "content": "say"}, {"role": "assistant", "content": "hello wor"}]
    body = {"messages": messages, "continue_final_message": True, "echo": True, "max_completion_tokens": 1}
    reply = await frontend.http.post("/v1/chat/completions", json=body)
    assert reply.json()["choices"][0]["message"]["content"].startswith("hello wor")
    text = (await frontend.http.post("/detokenize", json={"tokens": prompt_of(script.submissions[-1])})).json()[
        "prompt"
    ]
    assert text.endswith("<|im_start|>assistant\nhello wor")
    own = await frontend.http.post("/v1/chat/completions", json={"messages": messages, "chat_template": "{{ 1 }}"})
    assert (own.status_code, own.json()["error"]["param"]) == (400, "chat_template")
    top = await frontend.http.post("/v1/chat/completions", json={"messages": messages, "top_logprobs": 1})
    assert top.json()["error"]["message"] == "when using `top_logprobs`, `logprobs` must be set to true."
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]
    seen = await frontend.http.post("/v1/chat/completions", json={"messages": image})
    assert (seen.status_code, seen.json()["error"]["param"]) == (400, "messages")


async def test_tokenize_and_detokenize(frontend: Running) -> None:
    reply = (await frontend.http.post("/tokenize", json={"prompt": "hello 你好", "return_token_strs": True})).json()
    assert reply["count"] == len(reply["tokens"]) == len(reply["token_strs"])
    assert reply["max_model_len"] == 512
    back = (await frontend.http.post("/detokenize", json={"tokens": reply["tokens"]})).json()
    assert back == {"prompt": "hello 你好"}
    chat = (await frontend.http.post("/tokenize", json={"messages": [{"role": "user", "content": "hi"}]})).json()
    text = (await frontend.http.post("/detokenize", json={"tokens": chat["tokens"]})).json()["prompt"]
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    wrong = await frontend.http.post("/detokenize", json={"tokens": [-5]})
    assert wrong.status_code == 400


async def test_small_endpoints(frontend: Running) -> None:
    assert (await frontend.http.get("/version")).json() == {"version": VERSION}
    await frontend.until_idle()
    assert (await frontend.http.post("/ping")).status_code == 200
    paths = (await frontend.http.get("/openapi.json")).json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/models", "/tokenize", "/health"} <= set(paths)


async def test_long_prompts_go_through_the_thread_pool(frontend: Running, script: ScriptedScheduler) -> None:
    text = "hello world " * 100
    status, _ = await complete(frontend, prompt=text, max_tokens=1)
    assert status == 200
    reply = (await frontend.http.post("/tokenize", json={"prompt": text})).json()
    assert prompt_of(script.submissions[-1]) == reply["tokens"]
