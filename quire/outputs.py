"""Result types of the Python API."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, overload

from quire.shared.errors import InvalidArgument, QuireError
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb

Message = pb.GenerateResponse | pb.ChatResponse


@dataclass(frozen=True, slots=True)
class Logprob:
    """One position: the sampled token, its log-probability and rank, and the most likely tokens."""

    token_id: int
    logprob: float
    rank: int
    top: dict[int, float]


class FlatLogprobs(Sequence[Logprob]):
    """Log-probabilities stored as arrays: a fraction of the memory for many positions. Reads like a list of Logprob."""

    def __init__(self) -> None:
        self.starts = array("q", [0])  # start of each position's entries, and the end of the last one
        self.token_ids = array("q")
        self.logprobs = array("d")
        self.ranks = array("q")

    def extend(self, arrays: pb.LogprobArrays) -> None:
        """Appends the entries of a message; the first entry of each token is the sampled one."""
        for count in arrays.entry_counts:
            self.starts.append(self.starts[-1] + count)
        self.token_ids.extend(arrays.token_ids)
        self.logprobs.extend(arrays.logprobs)
        self.ranks.extend(arrays.ranks)

    def __len__(self) -> int:
        return len(self.ranks)

    @overload
    def __getitem__(self, index: int) -> Logprob: ...
    @overload
    def __getitem__(self, index: slice) -> list[Logprob]: ...
    def __getitem__(self, index: int | slice) -> Logprob | list[Logprob]:
        """Returns one position's logprobs as an object, which is built on access, or a list for a slice."""
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        start, end = self.starts[index], self.starts[index + 1]
        top = dict(zip(self.token_ids[start + 1 : end], self.logprobs[start + 1 : end], strict=True))
        return Logprob(self.token_ids[start], self.logprobs[start], self.ranks[index], top)


@dataclass(slots=True)
class ToolCall:
    """A call by the model; in a stream's Delta an increment: first id and name, then pieces of the arguments."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""  # JSON text

    def as_message(self) -> dict[str, Any]:
        """Returns the call as an entry of `tool_calls` for the assistant's message in a continued conversation."""
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(slots=True)
class CompletionOutput:
    """Holds one sample of a request: its text, tokens and finish reason."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None  # stop, length, cancelled, deadline, repetition
    stop_reason: int | str | None = None  # the stop token or string that matched
    logprobs: Sequence[Logprob] | None = None
    score: float | None = None  # score of a beam search
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)

    @property
    def rollout_log_probs(self) -> list[float]:
        """Log-probability of each of token_ids under the policy that sampled it, the denominator of a trainer's
        ratio. Raises InvalidArgument if the request did not ask for them (SamplingParams.logprobs)."""
        if self.logprobs is None or len(self.logprobs) != len(self.token_ids):
            raise InvalidArgument(
                "logprobs: rollout_log_probs requires a request with SamplingParams(logprobs=0)", field="logprobs"
            )
        if isinstance(self.logprobs, FlatLogprobs):
            return [self.logprobs.logprobs[start] for start in self.logprobs.starts[:-1]]
        return [each.logprob for each in self.logprobs]


@dataclass(slots=True)
class RequestOutput:
    """All samples of one prompt."""

    request_id: str = ""
    prompt: object = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    prompt_logprobs: Sequence[Logprob] | None = None  # positions from max(1, prompt_logprob_start) on
    error: QuireError | None = None  # set by an engine in this process if it ended early; clients raise it
    weight_version: str = ""  # version of the weights that computed the last token; "0": the initial ones

    @property
    def text(self) -> str:
        """Text of the first sample."""
        return self.outputs[0].text if self.outputs else ""

    @property
    def finished(self) -> bool:
        ended = bool(self.outputs) and all(output.finish_reason for output in self.outputs)
        return ended or self.error is not None


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document's index in the request, and its score for the query."""

    index: int
    score: float


def ranked(response: pb.RerankResponse) -> list[Ranked]:
    return [Ranked(found.index, found.score) for found in response.results]


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """One event of a stream that was started over HTTP, in the format of its endpoint."""

    type: str  # empty if the endpoint sends none
    data: str  # JSON, or "[DONE]"


@dataclass(frozen=True, slots=True)
class Delta:
    """Increment of a stream: new text and tokens of one sample."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    offset: int | None = None  # number of the message in a resumable stream, from 0; None: not stored
    event: StreamEvent | None = None  # replaces all fields but `offset` if the stream was started over HTTP


def text_of(message: Message) -> str:
    return message.content if isinstance(message, pb.ChatResponse) else message.text


def delta(message: Message) -> Delta:
    """Converts a message of a generation or chat stream; reasoning and tool calls exist only for chats."""
    offset = message.offset if message.HasField("offset") else None
    news = Delta(message.index, text_of(message), tuple(message.token_ids), finish_reason(message), offset=offset)
    if not isinstance(message, pb.ChatResponse):
        return news
    return replace(news, reasoning=message.reasoning, tool_calls=tuple(map(_tool_call, message.tool_calls)))


def attached(message: pb.AttachResponse) -> Delta:
    """Converts a message of a resumed stream: a delta, or an event of another dialect."""
    if not message.HasField("event"):
        return delta(message.chat if message.HasField("chat") else message.generate)
    event = message.event
    offset = event.offset if event.HasField("offset") else None
    return Delta(0, "", (), None, offset=offset, event=StreamEvent(event.type, event.data))


def _tool_call(piece: pb.ToolCallDelta) -> ToolCall:
    return ToolCall(piece.index, piece.id, piece.name, piece.arguments)


def finish_reason(message: Message) -> str | None:
    name = finish_pb2.FinishReason.Name(message.finish_reason).removeprefix("FINISH_REASON_")
    return None if name == "UNSPECIFIED" else name.lower()


def collect(messages: Iterable[Message], prompt: object) -> RequestOutput:
    """Returns the complete result of a stream."""
    gathered = OutputCollector(prompt)
    for message in messages:
        gathered.add(message)
    return gathered.result


class OutputCollector:
    """Accumulates the messages of a request."""

    def __init__(self, prompt: object) -> None:
        self.result = RequestOutput(prompt=prompt)
        self._samples: dict[int, CompletionOutput] = {}

    def add(self, message: Message) -> None:
        """Adds a message to its sample in the result; samples stay ordered by index."""
        if message.index not in self._samples:
            self._samples[message.index] = CompletionOutput(message.index)
            self.result.outputs = [self._samples[index] for index in sorted(self._samples)]
        _add(self.result, self._samples[message.index], message)


def _add(result: RequestOutput, sample: CompletionOutput, message: Message) -> None:
    """Adds a message to the result and its sample; lists and texts grow in place."""
    result.request_id = message.request_id or result.request_id
    sample.text += text_of(message)
    sample.token_ids.extend(message.token_ids)
    if isinstance(message, pb.ChatResponse):
        _add_parts(sample, message)
    sample.logprobs = _more(sample.logprobs, message.logprobs, message.flat_logprobs)
    result.prompt_logprobs = _more(result.prompt_logprobs, message.prompt_logprobs, message.flat_prompt_logprobs)
    if message.finish_reason:
        sample.finish_reason = finish_reason(message)
        result.weight_version = message.weight_version or result.weight_version
        sample.score = message.score if message.HasField("score") else None
        kind = message.WhichOneof("stop_reason")
        sample.stop_reason = getattr(message, kind) if kind else None
    if message.HasField("usage"):
        result.prompt_tokens = message.usage.prompt_tokens
        result.cached_tokens = message.usage.cached_tokens


def _add_parts(sample: CompletionOutput, message: pb.ChatResponse) -> None:
    """Appends a chat message's reasoning and pieces of tool calls, whose arguments arrive in parts."""
    sample.reasoning += message.reasoning
    for piece in message.tool_calls:
        if piece.index == len(sample.tool_calls):
            sample.tool_calls.append(_tool_call(piece))
        else:
            sample.tool_calls[piece.index].arguments += piece.arguments


def _more(
    known: Sequence[Logprob] | None, entries: Sequence[pb.TokenLogprobs], arrays: pb.LogprobArrays
) -> Sequence[Logprob] | None:
    """Returns `known` with a message's log-probabilities appended, as a list of objects or flat arrays, as they were
    sent."""
    if entries:
        return [*(known or ()), *map(_logprob, entries)]
    if arrays.ranks:
        known = known if isinstance(known, FlatLogprobs) else FlatLogprobs()
        known.extend(arrays)
    return known


def _logprob(entry: pb.TokenLogprobs) -> Logprob:
    top = {candidate.token_id: candidate.logprob for candidate in entry.top}
    return Logprob(entry.token_id, entry.logprob, entry.rank, top)


@dataclass(frozen=True, slots=True)
class Classification:
    """Class of a text."""

    label: str  # most likely class
    probs: list[float]  # probability of each class


def classifications(response: pb.ClassifyResponse) -> list[Classification]:
    """Returns one classification per input."""
    return [Classification(found.label, [*found.probabilities]) for found in response.classifications]


def token_vectors(response: pb.EmbedResponse) -> list[list[list[float]]]:
    """Returns the vectors of each input: [inputs][vectors][dimensions]; one vector if the server sends no counts."""
    counts = array("I")
    counts.frombytes(response.num_rows)
    found = []
    for column, count in zip(_columns(response), counts or [1] * len(response.vectors), strict=True):
        size = len(column) // count
        found.append([column[start : start + size] for start in range(0, len(column), size)])
    return found


def vectors(response: pb.EmbedResponse) -> list[list[float]]:
    """Returns one vector per input."""
    if response.num_rows:
        raise InvalidArgument("pooler: all and step return several vectors; use encode() for them", field="pooler")
    return _columns(response)


def vector(message: pb.EmbedStreamResponse) -> tuple[int, list[float]]:
    """Returns the index and vector of one input."""
    if message.num_rows:
        raise InvalidArgument("pooler: all and step return several vectors; use encode() for them", field="pooler")
    return message.index, _column(message.vector)


def _columns(response: pb.EmbedResponse) -> list[list[float]]:
    return [_column(column) for column in response.vectors]


def _column(column: bytes) -> list[float]:
    values = array("f")
    values.frombytes(column)
    return values.tolist()
