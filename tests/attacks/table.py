"""The attacks by name: requests that a limit refuses, and requests just below a limit."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from typing import Any

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.attacks.calls import Call, Post, Rpc
from tests.attacks.dialects import DIALECTS
from tests.attacks.floods import FLOODS
from tests.attacks.raw_http import RAW_HTTP
from tests.attacks.sizes import MB, MIB, words

MESSAGE = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def complete(copies: int = 1, **fields: Any) -> list[Call]:
    return [Post("/v1/completions", json.dumps({"prompt": "a", "max_tokens": 1, **fields}).encode())] * copies


def chat(copies: int = 1, **fields: Any) -> list[Call]:
    body = {"messages": [MESSAGE], "max_tokens": 1, **fields}
    return [Post("/v1/chat/completions", json.dumps(body).encode())] * copies


def post(path: str, copies: int = 1, **fields: Any) -> list[Call]:
    return [Post(path, json.dumps(fields).encode())] * copies


def generate(copies: int = 1, **fields: Any) -> list[Call]:
    return [Rpc("Generate", pb.GenerateRequest(**fields).SerializeToString())] * copies


def sampled(**fields: Any) -> list[Call]:
    return generate(text="a", sampling=sampling_pb2.SamplingParams(max_tokens=1, **fields))


def raw(path: str, body: bytes, copies: int = 1, **how: Any) -> list[Call]:
    return [Post(path, body, **how)] * copies


def regexes() -> list[Call]:
    chance = random.Random(1)
    made = []
    for number in range(20):
        if number % 2:
            bounds = ((chance.randrange(50, 900), chance.randrange(5, 60)) for _ in range(4))
            pattern = "".join(f"(a{{0,{most}}}b?){{1,{times}}}" for most, times in bounds)
            made += complete(structured_outputs={"regex": pattern})
        else:
            names = ["".join(chance.choices("abcdefgh", k=9)) for _ in range(4000)]
            schema = {"type": "object", "properties": {name: {"type": "string"} for name in names}}
            made += complete(structured_outputs={"json": schema})
    return made


def ambiguous() -> list[Call]:
    """Calls with one grammar each, whose masks take longer with every token."""
    ways = 's: s s | "a" | "b" | "ab" | "ba" | s s s | "a" s "b"'
    grammars = [f'start: s\n{ways} | "c{number}"\n' for number in range(16)]
    return [
        call
        for grammar in grammars
        for call in complete(max_tokens=600, ignore_eos=True, structured_outputs={"grammar": grammar})
    ]


def encoded(encoding: str, body: bytes, copies: int) -> list[Call]:
    return [Post("/v1/completions", body, encoding=encoding)] * copies


def nested(levels: int) -> bytes:
    return b'{"prompt":"a","x":' + b'{"a":' * levels + b"1" + b"}" * levels + b"}"


def deep(levels: int) -> dict[str, Any]:
    """A JSON Schema of nested arrays."""
    schema: dict[str, Any] = {"type": "null"}
    for _ in range(levels):
        schema = {"type": "array", "items": schema}
    return schema


def doubled(levels: int) -> dict[str, Any]:
    """A JSON Schema of one kilobyte that expands to 2 ** levels strings."""
    defs: dict[str, Any] = {"d0": {"type": "string"}}
    for level in range(1, levels):
        one = {"$ref": f"#/$defs/d{level - 1}"}
        defs[f"d{level}"] = {"type": "object", "properties": {"a": one, "b": one}, "required": ["a", "b"]}
    return {"$defs": defs, "$ref": f"#/$defs/d{levels - 1}"}


def form(copies: int = 1, **schema: Any) -> list[Call]:
    return complete(copies, structured_outputs={"json": schema}, max_tokens=16)


FORMS: dict[str, Callable[[], list[Call]]] = {
    "schema: 60 levels of arrays": lambda: form(**deep(60)),
    "schema: 2 ** 24 strings in a kilobyte, 4 at once": lambda: form(4, **doubled(24)),
    "schema: a reference to itself": lambda: form(**{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}),
    "schema: an array of 10 ** 9 items": lambda: form(type="array", items={"type": "null"}, minItems=10**9),
    "schema: a string of 10 ** 9 characters": lambda: form(type="string", minLength=10**9),
    "schema: bounds of 300 digits": lambda: form(type="integer", minimum=10**300, maximum=10**301),
    "schema: a multiple of 1e-300": lambda: form(type="number", multipleOf=1e-300),
    "schema: 200,000 constants": lambda: form(enum=list(range(200_000))),
    "schema: 1,000 patterns of properties": lambda: form(
        type="object", patternProperties={f"^a{{0,{n}}}b$": {"type": "null"} for n in range(1, 1_001)}
    ),
    "schema: a pattern that backtracks, 4 at once": lambda: form(4, type="string", pattern="^(a+)+(b+)+(a+)+c{0,500}$"),
    "schema: 500 alternatives of 500": lambda: form(
        anyOf=[{"type": "object", "properties": {f"p{n}": {"type": "null"} for n in range(500)}}] * 500
    ),
    "grammar: rules that only name each other": lambda: complete(
        structured_outputs={"grammar": "start: a\na: b\nb: a\n"}
    ),
    "grammar: nothing, repeated": lambda: complete(structured_outputs={"grammar": 'start: (""*)* "a"\n'}),
    "regex: 40 levels of repeats": lambda: complete(structured_outputs={"regex": "(" * 40 + "a" + "{1,9})" * 40}),
}
TEXTS: dict[str, Callable[[], list[Call]]] = {
    "text: half of a surrogate pair, 64 at once": lambda: raw(
        "/v1/chat/completions", b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}', 64
    ),
    "text: NUL in names": lambda: complete(model="a\0b", user="\0"),
    "text: 500,000 combining marks": lambda: complete(prompt="a" + "\u0301" * 500_000),
    "text: right-to-left marks in a model's name": lambda: complete(model="\u202e" * 10_000),
    "model: a name of 10 MB": lambda: complete(model="m" * (10 * MB)),
    "user: a name of 10 MB": lambda: complete(user="u" * (10 * MB)),
    "numbers: an integer of 1,000,000 digits": lambda: raw(
        "/v1/completions", b'{"prompt":"a","max_tokens":' + b"9" * MB + b"}"
    ),
    "numbers: 1e400 and NaN": lambda: raw("/v1/completions", b'{"prompt":"a","temperature":1e400,"top_p":NaN}'),
    "names: the same field 200,000 times": lambda: raw(
        "/v1/completions", b'{"prompt":"a"' + b',"max_tokens":1' * 200_000 + b"}"
    ),
    "logprobs: 20 of 4,000 tokens with the prompt's, 8 at once": lambda: complete(
        8, prompt=[7] * 4000, logprobs=20, prompt_logprobs=20, echo=True
    ),
    "beams: 64 of a call, 8 at once": lambda: complete(8, n=64, use_beam_search=True, max_tokens=64),
    "cache_salt: 1 MB": lambda: complete(cache_salt="s" * MB),
    "request ids: 256 alike": lambda: complete(256, request_id="same", max_tokens=8),
    "background: 256 responses": lambda: post("/v1/responses", 256, input="a", background=True),
    "chat_template_kwargs: 200,000": lambda: chat(chat_template_kwargs={f"k{n}": n for n in range(200_000)}),
    "chat_template: an endless one": lambda: chat(
        chat_template="{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    ),
    "tool calls: 20,000 in a turn": lambda: chat(
        messages=[
            MESSAGE,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
                    for n in range(20_000)
                ],
            },
        ]
    ),
    "tool calls: arguments nested 100,000 deep": lambda: chat(
        messages=[
            MESSAGE,
            {
                "role": "assistant",
                "tool_calls": [
                    {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a":' * 100_000}}
                ],
            },
        ]
    ),
    "images: 2,000 data URLs": lambda: chat(
        messages=[
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 4000}}] * 2000,
            }
        ]
    ),
}

ATTACKS: dict[str, Callable[[], list[Call]]] = {
    "prompt: 1 MB of a": lambda: complete(prompt="a" * MB),
    "prompt: 16 MB of a": lambda: complete(prompt="a" * (16 * MB)),
    "prompt: 15 MB of words, 4 at once": lambda: complete(4, prompt=words(15 * MB)),
    "prompt: 5 MB of Chinese": lambda: complete(prompt="你好，世界" * (MB // 3)),
    "prompt: 4 MB of emoji": lambda: complete(prompt="🙂" * MB),
    "prompt: 30 MB": lambda: complete(prompt="a" * (30 * MB)),
    "prompt: 30 MB in chunks": lambda: raw("/v1/completions", b'{"prompt":"' + b"a" * (30 * MB), chunked=True),
    "prompt: 60,000 characters, 64 at once": lambda: complete(64, prompt=words(60_000)),
    "prompt: 60,000 a, 64 at once": lambda: complete(64, prompt="a" * 60_000),
    "prompt: 260,000 token ids, 4 at once": lambda: complete(4, prompt=[7] * 260_000),
    "prompt: 3,000,000 token ids": lambda: complete(prompt=[7] * 3_000_000),
    "prompt: 1,024 in a call": lambda: complete(prompt=["a"] * 1024),
    "prompt: 1,024 in a call of 40 tokens": lambda: complete(prompt=["a"] * 1024, max_tokens=40, ignore_eos=True),
    "prompt: 200,000 in a call": lambda: complete(prompt=["a"] * 200_000),
    "n: 1,024 samples, 4 at once": lambda: complete(4, n=1024, temperature=1),
    "messages: 250,000": lambda: chat(messages=[MESSAGE] * 250_000),
    "messages: 80,000, 4 at once": lambda: chat(4, messages=[MESSAGE] * 80_000),
    "messages: 4,096, 16 at once": lambda: chat(16, messages=[MESSAGE] * 4096),
    "messages: 4,096 with a control token, 4 at once": lambda: chat(
        4, messages=[{"role": "user", "content": "x <|im_end|> y"}] * 4096
    ),
    "messages: 100,000 parts": lambda: chat(
        messages=[{"role": "user", "content": [{"type": "text", "text": "x"}] * 100_000}]
    ),
    "tools: 80,000": lambda: chat(tools=[TOOL] * 80_000),
    "tools: 512, 8 at once": lambda: chat(8, tools=[TOOL] * 512),
    "tools: a description of 10 MB": lambda: chat(
        tools=[{"type": "function", "function": {"name": "f", "description": words(10 * MB)}}]
    ),
    "stop: 1,000,000 strings": lambda: complete(stop=["s"] * MB),
    "stop: 200,000 strings": lambda: complete(stop=["s"] * 200_000),
    "stop: one of 10 MB": lambda: complete(stop="s" * (10 * MB)),
    "bad_words: one of 3.6 MB": lambda: complete(bad_words=["b" * 3_600_000]),
    "bad_words: 128 of 100 KB": lambda: complete(bad_words=["b" * 100_000] * 128),
    "bad_words: 128 of 1,000 characters, 16 at once": lambda: complete(16, bad_words=[words(1000)] * 128),
    "logit_bias: 200,000": lambda: complete(logit_bias={str(i): 1 for i in range(200_000)}),
    "allowed_token_ids: 260,000 texts": lambda: complete(allowed_token_ids=["x"] * 260_000),
    "prompt_logprob_token_ids: 200,000 texts": lambda: complete(prompt_logprob_token_ids=["x"] * 200_000),
    "metadata: 200,000": lambda: complete(metadata={str(i): "x" for i in range(200_000)}),
    "unknown fields: 200,000": lambda: complete(**{f"x{i}": 1 for i in range(200_000)}),
    "choice: 4,000 options": lambda: complete(structured_outputs={"choice": [f"way {i}" for i in range(4000)]}),
    "choice: 100,000 options": lambda: complete(structured_outputs={"choice": [f"way {i}" for i in range(100_000)]}),
    "regex and schema bombs: 20 at once": regexes,
    "grammar: ambiguous, 16 at once": ambiguous,
    "schema: 16 MB": lambda: complete(structured_outputs={"json": {"description": words(15 * MB)}}),
    "JSON: 100,000 deep": lambda: raw("/v1/completions", nested(100_000)),
    "encoded: gzip of 64 MB of spaces, 16 at once": lambda: encoded("gzip", gzip.compress(b" " * (64 * MB)), 16),
    "encoded: gzip in gzip of 1,000 MB, 16 at once": lambda: encoded(
        "gzip, gzip", gzip.compress(gzip.compress(b" " * (1000 * MB), 1)), 16
    ),
    "encoded: 200,000 empty members of gzip, 16 at once": lambda: encoded("gzip", gzip.compress(b"") * 200_000, 16),
    "encoded: 15 MB of words, 4 at once": lambda: encoded(
        "gzip", gzip.compress(json.dumps({"prompt": words(15 * MB)}).encode(), 1), 4
    ),
    "JSON: 16 MiB of [": lambda: raw("/v1/completions", b"[" * (16 * MIB - 1)),
    "JSON: 16 MiB of [],": lambda: raw("/v1/completions", b"[" + b"[]," * (5 * MIB) + b"1]"),
    "JSON: 16 MiB of escapes": lambda: raw(
        "/v1/completions", b'{"prompt":"' + b"\\u00e4" * (16 * MIB // 6 - 10) + b'"}'
    ),
    "JSON: 16 MiB of quotes": lambda: raw("/v1/completions", b'{"prompt":[' + b'"",' * (5 * MIB) + b'""]}'),
    "tokenize: 60,000 characters, 64 at once": lambda: post("/tokenize", 64, prompt=words(60_000)),
    "tokenize: 15 MB, 4 at once": lambda: post("/tokenize", 4, prompt=words(15 * MB)),
    "tokenize: 60,000 characters, 64 who leave": lambda: raw(
        "/tokenize", json.dumps({"prompt": words(60_000)}).encode(), 64, leaves_after_s=0.0
    ),
    "detokenize: 260,000 ids, 4 at once": lambda: post("/detokenize", 4, tokens=[300] * 260_000),
    "count_tokens: 80,000 messages": lambda: post("/v1/messages/count_tokens", messages=[MESSAGE] * 80_000),
    "responses: 80,000 items": lambda: post("/v1/responses", input=[MESSAGE] * 80_000),
    "embeddings: 1,024 texts, 4 at once": lambda: post("/v1/embeddings", 4, input=[words(4000)] * 1024),
    "embeddings: 260,000 token ids, 4 at once": lambda: post("/v1/embeddings", 4, input=[7] * 260_000),
    "classify: 1,024 texts, 4 at once": lambda: post("/classify", 4, input=[words(4000)] * 1024),
    "score: 1,024 pairs, 4 at once": lambda: post("/score", 4, queries=words(1000), documents=[words(3000)] * 1024),
    "rerank: 200,000 documents": lambda: post("/rerank", query="x", documents=["y"] * 200_000),
    "rerank: 1,024 documents, 4 at once": lambda: post("/rerank", 4, query="x", documents=[words(4000)] * 1024),
    "pooling: a text of 15 MB": lambda: post("/pooling", input=words(15 * MB)),
    "api/chat: 80,000 messages": lambda: post("/api/chat", messages=[MESSAGE] * 80_000),
    "api/embed: 200,000 texts": lambda: post("/api/embed", input=["x"] * 200_000),
    "generate: 260,000 token ids, 4 at once": lambda: post("/generate", 4, input_ids=[7] * 260_000),
    "batches of conversations: 4,096 of one message": lambda: post(
        "/v1/chat/completions/batch", messages=[[MESSAGE]] * 4096
    ),
    "gRPC: a message of 100 MB": lambda: generate(text="a" * (100 * MB)),
    "gRPC: three of 250 MB": lambda: generate(3, text="a" * (250 * MB)),
    "gRPC: 16 MiB of empty messages": lambda: [Rpc("Chat", b"\x0a\x00" * (8 * MIB - 8))],
    "gRPC: 260,000 messages, 4 at once": lambda: [Rpc("Chat", b"\x0a\x00" * 260_000)] * 4,
    "gRPC: 1,000,000 stop strings": lambda: sampled(stop=["s"] * MB),
    "gRPC: 15,000,000 token ids": lambda: generate(token_ids=pb.TokenIds(ids=[1] * (15 * MB))),
    "gRPC: a conversation of 15 MB": lambda: [
        Rpc("Chat", pb.ChatRequest(messages=[pb.ChatMessage(role="user", content=words(15 * MB))]).SerializeToString())
    ],
    "gRPC: tokenize 15 MB, 4 at once": lambda: (
        [Rpc("Tokenize", pb.TokenizeRequest(text=words(15 * MB)).SerializeToString(), streams=False)] * 4
    ),
    **DIALECTS,
    **FORMS,
    **TEXTS,
    **FLOODS,
    **RAW_HTTP,
}
