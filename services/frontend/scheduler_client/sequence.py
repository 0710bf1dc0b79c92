"""A sequence as its frontend owns it: everything needed to resubmit it when its session breaks."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from quire.services.frontend.request.outcome import Finish, TokenLogprobs
from quire.shared.errors import QuireError
from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import TOKEN_BYTES, MediaRange
from quire.shared.models.adapter_ids import AdapterId
from quire.shared.pb.common.v1 import media_pb2, model_pb2, sampling_pb2

if TYPE_CHECKING:
    from quire.services.frontend.scheduler_client.session import Session


def supported_block_size(layout: model_pb2.BlockLayout) -> int:
    """Returns the block size; 0 while no worker has reported it, or if the hash scheme is unknown to this version."""
    return layout.block_size if layout.hash_scheme == block_hash.SCHEME else 0


class PromptHashes:
    """Lazily computed block hashes of one prompt. `root` covers salt and adapter; `prompt` is an i32 column; `media`
    are its pictures, by offset."""

    __slots__ = ("_by_block_size", "_media", "_prompt", "root")

    def __init__(self, root: bytes, prompt: bytes, media: Seq[MediaRange] = ()) -> None:
        self.root = root
        self._prompt = prompt
        self._media = media
        self._by_block_size: dict[int, list[bytes]] = {}

    def block_hashes(self, block_size: int) -> list[bytes]:
        """Returns the hashes of the prompt's full blocks of `block_size` tokens, computed at the first call per block
        size."""
        found = self._by_block_size.get(block_size)
        if found is None:
            found = self._by_block_size[block_size] = block_hash.chain_with_media(
                self.root, self._prompt, block_size, self._media
            )
        return found

    def block_hashes_with_output(self, block_size: int, tokens: bytes) -> list[bytes]:
        """Returns the hashes of the full blocks of the prompt followed by `tokens`."""
        head = self.block_hashes(block_size)
        if not tokens:
            return head
        rest = self._prompt[len(head) * block_size * TOKEN_BYTES :] + tokens
        parent, start = head[-1] if head else self.root, len(head) * block_size
        return head + block_hash.chain_with_media(parent, rest, block_size, self._media, start)


@dataclass(frozen=True, slots=True)
class LateQuery:
    """Query that a late-interaction document is scored against. Each document carries it, so that it can run on any
    worker."""

    tokens: bytes  # i32 column
    params: bytes  # a serialized SequenceParams

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class PromptRequest:
    """A tokenized prompt and its parameters, ready for a scheduler; shared by all samples of the prompt. Times are the
    event loop's clock, in seconds."""

    request_id: str
    prompt: bytes  # i32 column
    num_prompt_tokens: int
    hashes: PromptHashes
    sampling: sampling_pb2.SamplingParams  # defaults filled in
    eos_token_ids: bytes  # u32 column
    params: bytes  # a serialized SequenceParams, read by workers only
    priority: int
    tenant: str
    arrival_s: float
    deadline_s: float | None
    grammar: bytes = b""  # a serialized StructuredOutput; empty: unconstrained
    samples_nothing: bool = False  # pooling: ends with a vector after prefill; max_tokens is 0
    traceparent: str = ""  # W3C trace context, if the request is traced
    adapter: AdapterId | None = None
    kv_priority: str = "normal"
    media: tuple[media_pb2.MediaItem, ...] = ()  # by offset
    late_query: LateQuery | None = None  # set: the result is one score instead of vectors

    @property
    def affinity_key(self) -> bytes:
        """Equal for requests that benefit from the same worker, whose cache serves them; empty: no preference."""
        return self.hashes.root + self.late_query.tokens if self.late_query is not None else b""

    @property
    def is_beam_search(self) -> bool:
        """Whether its samples are the results of one beam search, delivered when it ends."""
        return self.sampling.HasField("beam_search")

    @property
    def max_total_tokens(self) -> int:
        """Upper bound on the length of a sequence, prompt included."""
        return self.num_prompt_tokens + self.sampling.max_tokens


class SequenceEnd(NamedTuple):
    """How the scheduler ended a sequence. `error` is set if the whole request fails."""

    finish: Finish
    error: QuireError | None = None
    num_preemptions: int = 0


class OutputSink(Protocol):
    """Receives a sequence's output. Called from the session's read loop: must not block."""

    last_token_s: float
    weight_version: str  # version of the weights that computed the last token; set with the end

    def on_start(self, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        """Called when the sequence first leaves the scheduler's queue."""

    def on_prompt_logprobs(self, logprobs: list[TokenLogprobs]) -> None:
        """Called with the log-probabilities of the next prompt positions."""

    def on_tokens(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], end: SequenceEnd | None, now: float
    ) -> bool:
        """Called with new tokens. Returns True if no more are needed (a stop string matched)."""

    def on_vector(self, values: bytes) -> None:
        """Called with the pooling result, an f32 column."""

    def on_end(self, end: SequenceEnd, now: float) -> None:
        """Called when the sequence ends in a step without tokens."""


class Sequence:
    """One sample of a prompt: sample `number` of `prompt_request`, its tokens so far, and the session that runs it."""

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
        self.num_prompt_logprobs = 0  # positions received
        self.session: Session | None = None
        self.group: tuple[Sequence, ...] = ()  # all results of its beam search
        self.id = 0  # unique within the session
        self.has_started = False
        self.is_active = True
        self.refused_since_s: float | None = None  # time of the first refusal, until it starts
        self.migrating_since_s: float | None = None  # time of the last token before a move, until the next token

    @property
    def is_new(self) -> bool:
        return not self.has_started and not self.tokens

    def mark_migrating(self) -> None:
        """Notes the time of the last token before a move to another scheduler; later moves keep it."""
        if self.tokens:
            self.migrating_since_s = self.sink.last_token_s

    def record_start(self, num_cached_tokens: int, queue_us: int, encode_us: int) -> None:
        """Handles the scheduler's start message. Only the first start reports times and cached tokens; restarts after a
        move do not."""
        self.refused_since_s = None
        if not self.has_started:
            self.has_started = True
            self.sink.on_start(num_cached_tokens, queue_us, encode_us)
