"""A conversation of whole blocks, sent twice: every API reports the tokens read from the cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import openai
import pytest

from quire.client import Client
from quire.cluster import Cluster
from quire.params import SamplingParams

BLOCK = 16
NUM_BLOCKS = 2


@pytest.fixture(scope="module")
def http(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://{cluster.http_address}/v1", api_key="none", max_retries=0) as client:
        yield client


def whole_blocks(cluster: Cluster, word: str) -> list[dict[str, Any]]:
    """Messages that fill NUM_BLOCKS blocks with the template around them; `word` distinguishes conversations."""
    content = word
    for _ in range(BLOCK * NUM_BLOCKS):
        messages = [{"role": "user", "content": content}]
        count = httpx.post(f"http://{cluster.http_address}/tokenize", json={"messages": messages}).json()["count"]
        if count == BLOCK * NUM_BLOCKS:
            return messages
        content += " a"
    raise AssertionError(f"no number of words makes {BLOCK * NUM_BLOCKS} tokens of {word!r}")


def test_last_token_of_whole_blocks_is_always_recomputed(cluster: Cluster, http: openai.OpenAI) -> None:
    told: dict[str, list[tuple[int, int]]] = {}
    for edge, ask in edges(cluster, http).items():
        messages = whole_blocks(cluster, f"{edge}!")
        told[edge] = [ask(messages), ask(messages)]
    most = BLOCK * NUM_BLOCKS
    assert told == {edge: [(most, 0), (most, most - 1)] for edge in told}


def edges(cluster: Cluster, http: openai.OpenAI) -> dict[str, Any]:
    """Functions that return the prompt's tokens and how many of them were cached."""

    def chat(messages: Any) -> tuple[int, int]:
        usage = http.chat.completions.create(model="quire-tiny", messages=messages, max_tokens=1).usage
        return usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens

    def streamed(messages: Any) -> tuple[int, int]:
        wanted: Any = {"stream": True, "stream_options": {"include_usage": True}}
        *_, last = http.chat.completions.create(model="quire-tiny", messages=messages, max_tokens=1, **wanted)
        return last.usage.prompt_tokens, last.usage.prompt_tokens_details.cached_tokens

    def responses(messages: Any) -> tuple[int, int]:
        usage = http.responses.create(model="quire-tiny", input=messages, max_output_tokens=1).usage
        return usage.input_tokens, usage.input_tokens_details.cached_tokens

    def anthropics(messages: Any) -> tuple[int, int]:
        """Anthropic's API counts cached tokens separately from the remaining input."""
        with anthropic.Anthropic(base_url=f"http://{cluster.http_address}", api_key="none", max_retries=0) as client:
            usage = client.messages.create(model="quire-tiny", messages=messages, max_tokens=1).usage
        return usage.input_tokens + usage.cache_read_input_tokens, usage.cache_read_input_tokens

    def grpc(messages: Any) -> tuple[int, int]:
        with Client(cluster.grpc_address) as client:
            result = client.chat(messages, SamplingParams(max_tokens=1))[0]
        return result.prompt_tokens, result.cached_tokens

    return {"chat": chat, "streamed": streamed, "responses": responses, "messages": anthropics, "grpc": grpc}
