"""A sequence as its frontend owns it: enough to go on elsewhere when the session that ran it is gone."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.services.frontend.scheduler_client.prompt_hashes import PromptHashes
from quire.shared.errors import QuireError
from quire.shared.kv.block_hash import TOKEN_BYTES
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import sampling_pb2

if TYPE_CHECKING:
    from quire.services.frontend.scheduler_client.session import Session


@dataclass(frozen=True, slots=True)
class LateQuery:
    """What a document is compared with, token by token. Every document brings it along, so that it can go on
    anywhere."""

    tokens: bytes  # i32 column
    params: bytes  # a serialized SequenceParams

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A prompt and how to continue it, ready for a scheduler. Times are the event loop's, seconds."""

    request_id: str
    prompt: bytes  # i32 column
    num_prompt_tokens: int
    hashes: PromptHashes
    sampling: sampling_pb2.SamplingParams  # complete
    eos_token_ids: bytes  # u32 column
    params: bytes  # what only workers read: a serialized SequenceParams
    priority: int
    tenant: str
    arrival_s: float
    deadline_s: float | None
    grammar: bytes = b""  # a serialized StructuredOutput; empty: the output is not constrained
    samples_nothing: bool = False  # it ends with a vector when its prompt is computed; max_tokens is 0
    traceparent: str = ""  # of a request that is sampled
    adapter: AdapterId | None = None  # that it goes through
    kv_priority: str = "normal"
    late_query: LateQuery | None = None  # that it ends in one number for, in place of its vectors

    @property
    def affinity_key(self) -> bytes:
        """Equal for all that had better go to one place, for what that keeps of them; empty: it may go anywhere."""
        return self.hashes.root + self.late_query.tokens if self.late_query is not None else b""

    @property
    def is_beam_search(self) -> bool:
        """Its samples are the results of one beam search, and come when that is over."""
        return self.sampling.HasField("beam_search")

    @property
    def max_total_tokens(self) -> int:
        """The longest that a sequence of it can become."""
        return self.num_prompt_tokens + self.sampling.max_tokens


class SequenceEnd(NamedTuple):
    """How the scheduler ended a sequence; `error` instead of a finish where the whole request fails."""

    finish: Finish
    error: QuireError | None = None
    num_preemptions: int = 0


class OutputSink(Protocol):
    """Who wants the tokens. Called from the loop that reads the session: must not wait."""

    last_token_s: float
    weight_version: str  # of what computed the last token; set with the end

    def on_start(self, num_cached_tokens: int, queue_us: int) -> None:
        """It left the queue for the first time."""

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Of the next positions of its prompt."""

    def on_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], end: SequenceEnd | None, now: float
    ) -> bool:
        """Its next tokens; True: no more of them are wanted (a stop string matched)."""

    def on_vector(self, values: bytes) -> None:
        """What it ends with if it samples nothing: an f32 column."""

    def on_end(self, end: SequenceEnd, now: float) -> None:
        """It ended without a token in the same step."""


class Sequence:
    """Sample `number` of `work`: its tokens so far, and the session that runs it at present."""

    __slots__ = (
        "group",
        "has_started",
        "id",
        "is_active",
        "migrating_since_s",
        "num_prompt_logprobs",
        "number",
        "prompt_request",
        "refused_since_s",
        "session",
        "sink",
        "tokens",
    )

    def __init__(self, prompt_request: PromptRequest, number: int, sink: OutputSink) -> None:
        self.prompt_request = prompt_request
        self.number = number
        self.sink = sink
        self.tokens = array("i")
        self.num_prompt_logprobs = 0  # positions that have come
        self.session: Session | None = None
        self.group: tuple[Sequence, ...] = ()  # of a search: all its results
        self.id = 0  # in the session
        self.has_started = False
        self.is_active = True
        self.refused_since_s: float | None = None  # when schedulers began to refuse it
        self.migrating_since_s: float | None = None  # its last token, if it had to move since

    @property
    def is_new(self) -> bool:
        return not self.has_started and not self.tokens

    def mark_migrating(self) -> None:
        """It goes on elsewhere, perhaps not for the first time since its last token."""
        if self.tokens:
            self.migrating_since_s = self.sink.last_token_s

    def start(self, num_cached_tokens: int, queue_us: int) -> None:
        """Starting again after a move is not news: the first start told the queue time and what the cache held."""
        self.refused_since_s = None
        if not self.has_started:
            self.has_started = True
            self.sink.on_start(num_cached_tokens, queue_us)
