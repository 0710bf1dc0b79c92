"""Requests of all kinds to quire-tiny, and their results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from quire.services.worker.replica.replica import Replica
from tests.spec_decode.pair import Answer, Pair
from tests.spec_decode.questions import questions

MAX_TOKENS = 24
WORD = json.dumps({"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]})
KINDS: list[dict[str, Any]] = [
    {"logprobs": 5},
    {"temperature": 0.8, "seed": 3, "logprobs": 2},
    {"temperature": 1.3, "seed": 5, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "logprobs": 3},
    {"temperature": 0.9, "seed": 6, "top_p": 0.7, "logprobs": 0},
    {"temperature": 0.7, "seed": 1, "presence_penalty": 0.5, "frequency_penalty": 0.4, "logprobs": 12},
    {"repetition_penalty": 1.3, "logit_bias": {40: 2.0, 41: -1.0}, "logprobs": 1},
    {"temperature": 0.5, "seed": 9, "allowed_token_ids": list(range(3, 900)), "logprobs": 4},
    {"temperature": 1.0, "seed": 8, "structured_output": {"json_schema": WORD}, "logprobs": 2},
    {"temperature": 1.0, "seed": 2, "min_tokens": 20, "bad_words": [[33], [28, 33]], "logprob_token_ids": [5, 9, 33]},
    {"temperature": 0.6, "seed": 4},
]
Request = tuple[list[int], dict[str, Any]]
Given = tuple[list[int], list[tuple[list[int], list[float], int]]]  # tokens, and log-probabilities of each


def requests() -> list[Request]:
    return [(prompt, KINDS[i % len(KINDS)]) for i, prompt in enumerate(questions())]


def ask(pair: Pair, asked: Iterable[Request], **more: Any) -> list[Answer]:
    return [pair.ask(prompt, **({"max_tokens": MAX_TOKENS} | kind | more)) for prompt, kind in asked]


def given(answers: list[Answer]) -> list[Given]:
    return [(answer.tokens, answer.logprobs) for answer in answers]


def alone(replica: Replica, asked: Iterable[Request], **more: Any) -> list[Given]:
    """Runs each request separately, from an empty cache."""
    return list(_alone(replica, asked, **more))


def _alone(replica: Replica, asked: Iterable[Request], **more: Any) -> Iterator[Given]:
    for request in asked:
        pair = Pair(replica)
        answers = ask(pair, [request], **more)
        pair.run()
        yield given(answers)[0]
