"""Requests beyond a limit are refused with field, value and limit, before they cost anything."""

from __future__ import annotations

import asyncio
import json
import random
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import orjson
import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.services.frontend.bounds import counts, wire_scan
from quire.services.frontend.bounds.bodies import heavy_work, json_scan
from quire.services.frontend.output_processor import constraint
from quire.services.frontend.tokenizer.encoder import TextSizes
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.settings import FrontendSettings
from quire.shared.settings.request_limits import RequestLimits
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, scheduler
from tests.waiting import loop_turns

SMALL = {
    "max_values": 3000,
    "max_keys": 200,
    "max_depth": 20,
    "max_messages": 10,
    "max_parts": 15,
    "max_tools": 5,
    "max_form_characters": 5000,
    "max_stop": 4,
    "max_stop_token_ids": 6,
    "max_bad_words": 7,
    "max_word_characters": 30,
    "max_logit_bias": 8,
    "max_logits_processors": 2,
    "max_choices": 9,
    "max_metadata": 3,
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def frontend(folder: Path) -> AsyncIterator[Running]:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address, limits=SMALL) as started:
        yield started


def nested(levels: int) -> dict[str, Any]:
    value: Any = {}
    for _ in range(levels):
        value = {"a": value}
    return {"type": "object", "properties": value}


MESSAGE = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
PARTS = {"role": "user", "content": [{"type": "text", "text": "x"}] * 8}
TOO_MUCH: dict[str, tuple[str, dict[str, Any], str]] = {
    "values": ("/v1/completions", {"prompt": [1] * 3001}, "more than 3000 values (max_values)"),
    "keys": ("/v1/completions", {"prompt": "x", "logit_bias": {str(i): 1 for i in range(201)}}, "200 named fields"),
    "depth": (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "chat_template_kwargs": nested(30)},
        "nested 3",
    ),
    "messages": ("/v1/chat/completions", {"messages": [MESSAGE] * 11}, "messages has 11 entries; at most 10"),
    "items": ("/v1/responses", {"input": [MESSAGE] * 11}, "input has 11 entries; at most 10"),
    "turns": ("/v1/messages", {"messages": [MESSAGE] * 11, "max_tokens": 1}, "messages has 11 entries; at most 10"),
    "counted turns": ("/v1/messages/count_tokens", {"messages": [MESSAGE] * 11}, "messages has 11 entries"),
    "tokenized messages": ("/tokenize", {"messages": [MESSAGE] * 11}, "messages has 11 entries; at most 10"),
    "messages for Ollama": ("/api/chat", {"messages": [MESSAGE] * 11}, "messages has 11 entries; at most 10"),
    "stop in options": ("/api/generate", {"prompt": "x", "options": {"stop": ["a"] * 5}}, "stop has 5 entries"),
    "a stop string in options": ("/api/generate", {"prompt": "x", "options": {"stop": "s" * 31}}, "of 31 characters"),
    "an Ollama format": ("/api/chat", {"messages": [MESSAGE], "format": {"x": "y" * 5001}}, "(max_form_characters)"),
    "stop in SGLang": ("/generate", {"text": "x", "sampling_params": {"stop": ["a"] * 5}}, "stop has 5 entries"),
    "texts for SGLang's ids": ("/generate", {"input_ids": ["x"] * 1025}, "input_ids must hold token ids"),
    "parts": ("/v1/chat/completions", {"messages": [PARTS, PARTS]}, "messages: 16 content parts and tool calls"),
    "tools": ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * 6}, "tools has 6 entries; at most 5"),
    "forms": (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "tools": [{**TOOL, "function": {"name": "f", "description": "x" * 5001}}]},
        "tools: tools, schemas and grammars may have at most 5000 characters together (max_form_characters)",
    ),
    "stop": (
        "/v1/completions",
        {"prompt": "x", "stop": ["a"] * 5},
        "stop has 5 entries; at most 4 are accepted (max_stop)",
    ),
    "a stop string": ("/v1/completions", {"prompt": "x", "stop": "s" * 31}, "stop: a text of 31 characters"),
    "stop sequences": (
        "/v1/messages",
        {"messages": [MESSAGE], "max_tokens": 1, "stop_sequences": ["a"] * 5},
        "stop_sequences has 5 entries",
    ),
    "texts for ids": ("/detokenize", {"tokens": ["x"] * 1025}, "tokens must hold token ids, which are integers"),
    "texts for named tokens": (
        "/v1/completions",
        {"prompt": "x", "prompt_logprob_token_ids": [[1], ["x"]] * 513},
        "prompt_logprob_token_ids must hold token ids",
    ),
    "stop tokens": ("/v1/completions", {"prompt": "x", "stop_token_ids": [1] * 7}, "stop_token_ids has 7 entries"),
    "bad words": ("/v1/completions", {"prompt": "x", "bad_words": ["b"] * 8}, "bad_words has 8 entries; at most 7"),
    "a bad word": ("/v1/completions", {"prompt": "x", "bad_words": ["b" * 31]}, "bad_words: a text of 31 characters"),
    "biases": (
        "/v1/completions",
        {"prompt": "x", "logit_bias": {str(i): 1 for i in range(9)}},
        "logit_bias has 9 entries; at most 8 are accepted (max_logit_bias)",
    ),
    "logits processors": (
        "/v1/completions",
        {"prompt": "x", "logits_processors": {"a": None, "b": {}, "c": {"d": 1}}},
        "logits_processors has 3 entries; at most 2 are accepted (max_logits_processors)",
    ),
    "choices": (
        "/v1/completions",
        {"prompt": "x", "structured_outputs": {"choice": [str(i) for i in range(10)]}},
        "choice has 10 entries; at most 9 are accepted (max_choices)",
    ),
    "metadata": (
        "/v1/responses",
        {"input": "x", "metadata": {str(i): "x" for i in range(4)}},
        "metadata has 4 entries; at most 3 are accepted (max_metadata)",
    ),
    "a value of metadata": ("/v1/responses", {"input": "x", "metadata": {"a": "x" * 513}}, "metadata: 'a'"),
    "characters": ("/v1/completions", {"prompt": "x" * 100_000}, "your prompt has 100000 characters"),
    "characters of messages": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "x" * 50_000}] * 2},
        "your messages have more than",
    ),
    "depth inside a text": (
        "/v1/chat/completions",
        {
            "messages": [
                {
                    "role": "assistant",
                    "content": "",
                    "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": "[" * 4000}}],
                }
            ]
        },
        "arguments of tool call 'a' are not JSON",
    ),
    "counted characters": ("/tokenize", {"prompt": "x" * 100_000}, "your prompt has 100000 characters"),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", TOO_MUCH)
async def test_what_is_too_much_is_refused_by_name_and_limit(frontend: Running, what: str) -> None:
    path, body, text = TOO_MUCH[what]
    reply = await frontend.http.post(path, json=body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert text in (error if isinstance(error, str) else error["message"])


CALLS: dict[str, tuple[Any, str]] = {
    "messages": (pb.ChatRequest(messages=[pb.ChatMessage(role="user")] * 11), "messages has 11 entries"),
    "conversation": (
        pb.GenerateRequest(conversation=pb.Conversation(messages=[pb.ChatMessage(role="user")] * 11)),
        "messages has 11 entries",
    ),
    "tools": (pb.ChatRequest(tools=[pb.Tool(name="f")] * 6), "tools has 6 entries"),
    "forms": (pb.ChatRequest(tools=[pb.Tool(name="f", parameters=" " * 5001)]), "tools: tools, schemas and grammars"),
    "depth": (pb.ChatRequest(tools=[pb.Tool(name="f", parameters="[" * 4000)]), "tools is not JSON"),
    "a schema": (
        pb.ChatRequest(
            messages=[pb.ChatMessage(role="user", content="x")],
            tools=[pb.Tool(name="f")],
            sampling=sampling_pb2.SamplingParams(structured_output={"json_schema": "[1," * 100_000}),
        ),
        "json_schema has 300004 bytes; at most 131072 are accepted",
    ),
    "kwargs": (pb.ChatRequest(chat_template_kwargs=" " * 5001), "chat_template_kwargs: tools, schemas"),
    "stop": (pb.GenerateRequest(text="x", sampling={"stop": ["a"] * 5}), "stop has 5 entries"),
    "a stop string": (pb.GenerateRequest(text="x", sampling={"stop": ["a" * 31]}), "stop: a text of 31 characters"),
    "bad words": (pb.GenerateRequest(text="x", sampling={"bad_words": ["a"] * 8}), "bad_words has 8 entries"),
    "biases": (
        pb.GenerateRequest(text="x", sampling={"logit_bias": dict.fromkeys(range(9), 1.0)}),
        "logit_bias has 9 entries",
    ),
    "choices": (
        pb.GenerateRequest(
            text="x",
            sampling=sampling_pb2.SamplingParams(structured_output={"choice": {"options": map(str, range(10))}}),
        ),
        "choice has 10 entries",
    ),
    "ids": (pb.GenerateRequest(token_ids={"ids": [1] * 3001}), "ids has 3001 entries; at most 3000"),
    "many ids": (pb.GenerateRequest(token_ids={"ids": [300] * 9000}), "more than 3000 values (max_values)"),
    "characters": (pb.GenerateRequest(text="x" * 100_000), "your prompt has 100000 characters"),
    "fields": (pb.ChatRequest(messages=[pb.ChatMessage()] * 4000), "more than 3000 values (max_values)"),
}


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize("what", CALLS)
async def test_messages_have_the_same_bounds(frontend: Running, what: str) -> None:
    message, text = CALLS[what]
    method = frontend.inference.Chat if isinstance(message, pb.ChatRequest) else frontend.inference.Generate
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in method(message):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert text in (refused.value.details() or "")


@pytest.mark.asyncio(loop_scope="module")
async def test_what_is_just_small_enough_is_answered(frontend: Running) -> None:
    body = {
        "messages": [MESSAGE] * 10,
        "stop": ["s" * 30] * 4,
        "bad_words": ["b" * 30] * 7,
        "logit_bias": {str(i): 1 for i in range(8)},
        "metadata": {str(i): "x" * 512 for i in range(3)},
        "max_tokens": 3,
    }
    reply = await frontend.http.post("/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text


@pytest.mark.asyncio(loop_scope="module")
async def test_a_message_that_is_none_is_an_invalid_argument(frontend: Running) -> None:
    call = frontend.channel.unary_stream("/quire.inference.v1.InferenceService/Generate")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        async for _ in call(b"\xff\xff\xff"):
            pass
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "GenerateRequest" in (refused.value.details() or "")


def test_fields_without_end_are_refused_before_they_are_looked_at() -> None:
    with pytest.raises(InvalidArgument, match="the body has 300 fields; at most 256 are accepted"):
        counts.check_body({f"x{i}": 1 for i in range(300)}, 3000, RequestLimits())


@pytest.mark.asyncio(loop_scope="module")
async def test_nothing_is_tokenized_for_a_client_that_has_left(
    frontend: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = frontend.frontend.model.tokenizer._encoder
    monkeypatch.setattr(encoder, "sizes", TextSizes(100, 100))
    tokenizing, pieces, begun, go_on = encoder.text_encoder, [], threading.Event(), threading.Event()

    def encode(text: str, _framed: bool) -> list[int]:
        pieces.append(text)
        begun.set()
        go_on.wait(60)
        return [1]

    monkeypatch.setattr(tokenizing, "ids", encode)
    body = json.dumps({"prompt": "hello world " * 300}).encode()
    host, _, port = frontend.frontend.http_address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port))
    head = b"POST /tokenize HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    writer.write(head % len(body) + body)
    assert await asyncio.to_thread(begun.wait, 60)
    writer.close()
    await writer.wait_closed()
    for _ in range(3):  # the loop has noticed the disconnect
        assert (await frontend.http.get("/version")).status_code == 200
    go_on.set()
    monkeypatch.undo()
    assert (await frontend.http.post("/tokenize", json={"prompt": "hello world " * 200})).status_code == 200
    assert len(pieces) <= 2


@pytest.mark.parametrize("kind", ["json_schema", "structural_tag"])
def test_a_schema_nested_too_deeply_is_left_to_its_own_check(kind: str) -> None:
    assert constraint.to_structural_format(sampling_pb2.StructuredOutput(**{kind: '{"a":' * 4000})) is None


def test_limits_are_settings() -> None:
    made = FrontendSettings(model="x", limits={"max_tools": "7"})
    assert made.request_limits == RequestLimits(max_tools=7)
    with pytest.raises(ValueError, match="unknown limit 'max_tolls'; known limits: max_values, "):
        FrontendSettings(model="x", limits={"max_tolls": 7})
    with pytest.raises(ValueError, match="greater than 0"):
        FrontendSettings(model="x", limits={"max_tools": 0})


TEXTS = st.text(st.sampled_from('\\",[]{}:a\n"é'), max_size=12)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=40,
)


def count(value: Any) -> int:
    """Counts containers, and the entries after the first of each."""
    if isinstance(value, dict | list):
        inside = value.values() if isinstance(value, dict) else value
        return 1 + max(0, len(value) - 1) + sum(map(count, inside))
    return 0


def depth(value: Any) -> int:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if inside is None else 1 + max(map(depth, inside), default=0)


@pytest.mark.parametrize("max_examples", [50, pytest.param(300, marks=pytest.mark.slow)])
def test_json_is_counted_as_it_is_parsed(max_examples: int) -> None:
    of_random_values = given(VALUES, st.integers(1, 9), st.booleans())(is_counted_as_it_is_parsed)
    settings(max_examples=max_examples, deadline=None)(of_random_values)()


def is_counted_as_it_is_parsed(value: Any, slice_bytes: int, escaped: bool) -> None:
    text = json.dumps(value, ensure_ascii=escaped).encode()
    before, json_scan.SLICE_BYTES = json_scan.SLICE_BYTES, slice_bytes
    try:
        passes(text, RequestLimits(max_values=max(1, count(value)), max_depth=max(1, depth(value))))
        if count(value) > 1:
            refuses(text, RequestLimits(max_values=count(value) - 1, max_depth=100), "values")
        if depth(value) > 1:
            refuses(text, RequestLimits(max_values=1000, max_depth=depth(value) - 1), "nested")
    finally:
        json_scan.SLICE_BYTES = before


def passes(text: bytes, limits: RequestLimits) -> None:
    for _ in json_scan.check(text, limits):
        pass


def refuses(text: bytes, limits: RequestLimits, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        passes(text, limits)


def test_any_bytes_can_be_counted() -> None:
    chance = random.Random(3)
    for _ in range(3000):
        text = bytes(chance.choices(b'[]{},:"\\ab\n', k=chance.randrange(40)))
        try:
            passes(text, RequestLimits(max_values=chance.randrange(1, 9), max_depth=chance.randrange(1, 5)))
        except InvalidArgument:
            with_less = max(text.count(b"[") + text.count(b"{"), 0) + text.count(b",")
            assert with_less > 1


def test_fields_are_counted_without_parsing() -> None:
    message = pb.ChatRequest(messages=[pb.ChatMessage(role="u", tool_calls=[pb.ToolCall(id="a")] * 3)] * 100)
    fields = 100 * (1 + 1 + 3 * 2)
    data = message.SerializeToString()
    assert set(wire_scan.check(data, pb.ChatRequest.DESCRIPTOR, RequestLimits(max_values=fields))) <= {None}
    with pytest.raises(InvalidArgument, match=f"more than {fields - 1} values"):
        for _ in wire_scan.check(data, pb.ChatRequest.DESCRIPTOR, RequestLimits(max_values=fields - 1)):
            pass


def test_any_bytes_are_left_to_the_parser() -> None:
    chance = random.Random(4)
    for _ in range(2000):
        data = chance.randbytes(chance.randrange(60))
        try:
            for _ in wire_scan.check(data, pb.ChatRequest.DESCRIPTOR, RequestLimits(max_values=5)):
                pass
        except InvalidArgument:
            assert len(data) > 5


async def test_large_bodies_that_come_together_leave_turns_to_others() -> None:
    """Large bodies are processed one at a time, smallest first."""
    work, done = heavy_work.HeavyWorkLimiter(), []

    async def parse(num_bytes: int) -> None:
        async with work.slot(num_bytes):
            done.append(num_bytes)

    async def other() -> None:
        while len(done) < 22:
            seen.append(len(done))
            await loop_turns()

    seen: list[int] = []
    sizes = [heavy_work.LIGHT_BYTES + size for size in (9, 3, 5, 1, 7)] * 4
    async with asyncio.TaskGroup() as tasks:
        for size in (*sizes, 10, 20):
            tasks.create_task(parse(size))
        tasks.create_task(other())
    first, *rest = [size for size in done if size > heavy_work.LIGHT_BYTES]
    assert done[:3] == [first, 10, 20], "a cheap call does not wait"
    assert rest == sorted(rest)
    assert len(set(seen)) >= 19, "other calls run between any two"


async def test_work_on_large_bodies_leaves_the_loop_to_others() -> None:
    """The loop runs other tasks between two slices."""
    body = orjson.dumps({"messages": [{"role": "user", "content": '"[,]"' * 1000}] * 1000})
    assert len([*json_scan.check(body, RequestLimits(max_values=10_000))]) > 2 * len(body) // json_scan.SLICE_BYTES


def test_a_long_text_of_escaped_quotes_is_counted_in_one_go() -> None:
    """Tool call arguments are such texts. When a slice ended inside one, every quote was tried as an opening quote, and
    the checking process hung."""
    body = orjson.dumps({"messages": [{"arguments": '{"a":' * 100_000}]})
    passes(body, RequestLimits())
    refuses(body + b"[" * 2_000, RequestLimits(), "nested")
