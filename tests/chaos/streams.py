"""Many live streams, recorded token by token: outputs, times and errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from quire.async_client import AsyncClient
from quire.params import SamplingParams, StructuredOutput
from tests.waiting import eventually
from tools.evals import held_back_items
from tools.training.chat import prompt

# What streams are asked for (`assert_survives`): one kind shows what breaks, the others what breaks for them alone.
KINDS = [
    "everything",
    pytest.param("constrained", marks=pytest.mark.slow),
    pytest.param("greedy", marks=[pytest.mark.slow, pytest.mark.sweep]),
]
NUM_STREAMS = 32
MAX_TOKENS = 400
GREEDY_TOKENS = 240  # together as many as the samples of `everything`


def prompts() -> list[str]:
    """Prompts with long answers, which count on and on."""
    items = [item for item in held_back_items(per_size=40, names=("counting",)) if item.max_tokens >= MAX_TOKENS]
    chosen = items[:NUM_STREAMS]
    assert len(chosen) == NUM_STREAMS
    return [prompt(item.messages, item.tools) for item in chosen]


@dataclass
class Stream:
    """One stream as seen by its client."""

    prompt: str
    params: SamplingParams
    token_ids: dict[int, list[int]] = field(default_factory=dict)  # by sample
    text: dict[int, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    arrivals: list[float] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def longest_gap_s(self) -> float:
        return max((b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)), default=0.0)

    @property
    def said(self) -> tuple[dict[int, list[int]], dict[int, str], dict[int, str]]:
        return self.token_ids, self.text, self.finish

    async def run(self, client: AsyncClient) -> None:
        try:
            async for delta in client.stream(self.prompt, self.params):
                self.arrivals.append(time.monotonic())
                self.token_ids.setdefault(delta.index, []).extend(delta.token_ids)
                self.text[delta.index] = self.text.get(delta.index, "") + delta.text
                if delta.finish_reason:
                    self.finish[delta.index] = delta.finish_reason
        except Exception as error:
            self.error = error


class Crowd:
    """All streams of a test."""

    def __init__(self, address: str, params: Callable[[int], SamplingParams], count: int = NUM_STREAMS) -> None:
        self.streams = [Stream(text, params(i)) for i, text in enumerate(prompts()[:count])]
        self._client = AsyncClient(address)
        self._tasks = [asyncio.ensure_future(stream.run(self._client)) for stream in self.streams]

    async def all_streaming(self, tokens: int = 20) -> None:
        """Waits until every stream has received `tokens` tokens."""
        await eventually(
            lambda: all(stream.error or sum(map(len, stream.token_ids.values())) >= tokens for stream in self.streams)
        )

    async def finished(self, timeout_s: float = 150) -> None:
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*self._tasks)
        await self._client.close()

    @property
    def errors(self) -> list[BaseException]:
        return [stream.error for stream in self.streams if stream.error is not None]

    @property
    def longest_gap_s(self) -> float:
        return max(stream.longest_gap_s for stream in self.streams)


def greedy(_index: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS)


def everything(index: int) -> SamplingParams:
    """Parameters with sampling, seeds and log-probabilities."""
    return SamplingParams(n=2, temperature=0.8, top_p=0.9, seed=1000 + index, logprobs=2, max_tokens=120)


def constrained(index: int) -> SamplingParams:
    """Parameters with a different schema for each stream, shared by two samples."""
    words = {"type": "string", "pattern": "^[a-z]{2,6}( [a-z]{2,6}){2}$"}
    count = {"type": "integer", "minimum": 0, "maximum": 99 + index}
    record = {"type": "object", "properties": {f"words{index}": words, "count": count}, "additionalProperties": False}
    records = {"items": {**record, "required": list(record["properties"])}, "minItems": 4, "maxItems": 4}
    form = StructuredOutput(json={"type": "array", **records})
    return SamplingParams(n=2, temperature=1.0, seed=2000 + index, max_tokens=MAX_TOKENS, structured_output=form)


def differences(crowd: Crowd, undisturbed: Sequence[tuple[object, ...]]) -> list[str]:
    """Returns a line for each stream whose outputs are not those of the undisturbed run: tokens, text and finish of the
    samples that differ, from the first different token on."""
    found = []
    for number, (stream, expected) in enumerate(zip(crowd.streams, undisturbed, strict=True)):
        if stream.said != expected:
            found.append(f"stream {number}: {'; '.join(_sample_differences(stream.said, expected)) or 'other samples'}")
    return found


def _sample_differences(said: tuple[Any, ...], expected: tuple[Any, ...]) -> Iterator[str]:
    """Yields what differs in each sample of one stream: where its tokens do first, then its text or finish."""
    for sample in sorted({*said[0], *expected[0]}):
        (ours, text, finish), (theirs, due_text, due_finish) = (
            (ids.get(sample, []), texts.get(sample, ""), ends.get(sample)) for ids, texts, ends in (said, expected)
        )
        if ours != theirs:
            pairs = enumerate(zip(ours, theirs, strict=False))
            at = next((k for k, (a, b) in pairs if a != b), min(len(ours), len(theirs)))
            yield f"sample {sample} from token {at} of {len(theirs)}: {ours[at : at + 8]} not {theirs[at : at + 8]}"
        elif text != due_text:
            yield f"sample {sample}: equal tokens, text {text!r} not {due_text!r}"
        elif finish != due_finish:
            yield f"sample {sample}: finish {finish} not {due_finish}"
