"""What comes back, typed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from shared.pb.common.v1 import finish_pb2
from shared.pb.inference.v1 import inference_pb2 as pb

Message = pb.GenerateResponse | pb.ChatResponse


@dataclass(frozen=True, slots=True)
class Logprob:
    """One output position: the sampled token, its log-probability and rank, and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


@dataclass(slots=True)
class CompletionOutput:
    """One sample."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, cancelled, deadline, repetition
    stop_reason: int | str | None = None  # the stop token or string that matched
    logprobs: list[Logprob] | None = None


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt."""

    request_id: str = ""
    prompt: object = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def text(self) -> str:
        """Of the first sample."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def finished(self) -> bool:
        return bool(self.outputs) and all(output.finish_reason for output in self.outputs)


@dataclass(frozen=True, slots=True)
class Delta:
    """What a stream brings: new text and tokens of one sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None


def text_of(message: Message) -> str:
    return message.content if isinstance(message, pb.ChatResponse) else message.text


def delta(message: Message) -> Delta:
    return Delta(message.index, text_of(message), tuple(message.token_ids), finish_reason(message))


def finish_reason(message: Message) -> str | None:
    name = finish_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_")
    return None if name == "UNSPECIFIED" else name.lower()


def collect(messages: Iterable[Message], prompt: object) -> RequestOutput:
    """A finished request from its stream."""
    result = RequestOutput(prompt=prompt)
    samples: dict[int, CompletionOutput] = {}
    for message in messages:
        _add(result, samples.setdefault(message.index, CompletionOutput(message.index)), message)
    result.outputs = [samples[index] for index in sorted(samples)]
    return result


def _add(result: RequestOutput, sample: CompletionOutput, message: Message) -> None:
    result.request_id = message.request_id or result.request_id
    sample.text += text_of(message)
    sample.token_ids.extend(message.token_ids)
    if message.logprobs:
        sample.logprobs = (sample.logprobs or []) + [_logprob(entry) for entry in message.logprobs]
    if message.finish_reason:
        sample.finish_reason = finish_reason(message)
        kind = message.WhichOneof("stop_reason")
        sample.stop_reason = getattr(message, kind) if kind else None
    if message.HasField("usage"):
        result.prompt_tokens = message.usage.prompt_tokens
        result.cached_tokens = message.usage.cached_tokens


def _logprob(entry: pb.TokenLogprobs) -> Logprob:
    top = {candidate.token_id: candidate.logprob for candidate in entry.top}
    return Logprob(entry.token_id, entry.logprob, entry.rank, top)
