"""The attacks: what is sent, at once, by name. Those that a limit refuses, and those that it just lets in."""

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
    """Each a grammar of its own, whose masks take longer with every token."""
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
    **FLOODS,
}
