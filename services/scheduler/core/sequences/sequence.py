"""Sequence: one stream of tokens, the unit of scheduling."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.scheduler.core.sequences.tokens import TOKEN_BYTES, SequenceTokens
from quire.services.scheduler.kv_cache.kv_priority import KVPriority

if TYPE_CHECKING:
    from quire.services.scheduler.core.sequences.beam_search import BeamSearchState


class SequenceStatus(Enum):
    """Scheduling state: blocked on a prerequisite, waiting in the queue, running in a slot, preempted (queued again)
    or finished."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class WorkerLoss(NamedTuple):
    """Attachment of a worker that ended without the worker leaving on its own."""

    worker_id: str
    epoch: int


@dataclass(slots=True, eq=False)
class SampleGroup:
    """Samples of one prompt. Compared by identity."""

    replica: object = None  # replica of the sample that was placed last; opaque here


@dataclass(frozen=True, slots=True, eq=False)
class LateQuery:
    """Late-interaction query, which documents are scored against token by token."""

    name: bytes  # 32 bytes; equal queries have equal names
    tokens: bytes  # i32 column
    payload: object = None  # what the worker needs besides the tokens; opaque here

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens: the request's parameters and the progress so far."""

    key: int  # unique during the scheduler's lifetime
    owner: int  # id of the frontend session that it belongs to
    sequence_id: int  # its id within that session
    tokens: SequenceTokens  # prompt, then output
    num_prompt_tokens: int
    max_total_tokens: int  # prompt and output together
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    root_hash: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)  # hashes of all full blocks of `tokens`
    skip_reading_prefix_cache: bool = False
    asks_logprobs: bool = False
    samples_nothing: bool = False  # it ends with a vector when its tokens are computed (pooling)
    prompt_logprobs_from: int = 0  # next prompt position whose log-probabilities are due; 0: not requested
    repetition: RepetitionRule | None = None
    min_output_tokens: int = 0  # minimum output before repetition is detected
    grammar_id: bytes = b""  # id of the grammar that constrains its output; empty: none
    grammar_bytes: int = 0  # size of the grammar's text
    media: tuple[MediaItem, ...] = ()  # by offset
    query: LateQuery | None = None  # query that it is scored against, or that it computes
    is_query: bool = False  # internal sequence that computes the query (late_queries.py)
    adapter: object = None  # adapter that it needs; opaque here
    sample_group: SampleGroup | None = None  # set if the sequence has siblings
    search: BeamSearchState | None = None  # beam search of a root (beam/beams.py)
    outputs: list[Sequence] = field(
        default_factory=list
    )  # of a root: sequences that the frontend waits for, itself first
    num_logprobs: int | None = None  # of a root: log-probabilities requested in addition to the sampled token's
    is_beam: bool = False  # beam of a search, known only to the search
    payload: object = None  # what the worker needs besides the tokens; opaque here
    request_id: str = ""
    priority: int = 0
    kv_priority: KVPriority = KVPriority.NORMAL
    tenant: str = ""
    arrival: float = 0.0  # arrival at the frontend, seconds of the scheduler's clock
    queued_at: float = 0.0  # arrival at this scheduler
    deadline: float = math.inf

    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    order: int = -1  # arrival rank within a core
    tenant_index: int = 0  # index of its tenant within a policy
    urgency: float = 0.0  # sort key of the priority policy: smaller is more urgent
    fence: int = 0  # id of the step that must have returned before it may run again
    num_preemptions: int = 0
    restart_points: tuple[int, ...] = ()  # numbers of leading blocks after which others may start (tier_lookup.py)
    num_fetches: int = 0  # number of waits for fetched blocks
    losses: tuple[WorkerLoss, ...] = ()  # consecutive losses without a token in between
    moved_at: float | None = None  # time of its last token on the worker that it left; None once it has continued
    num_queued_tokens: int = 0  # tokens that the waiting queue counts for it
    num_cached_tokens: int = 0  # cached tokens at its first admission
    was_admitted: bool = False
    encode_s: float = 0.0  # time since it was queued in which a worker encoded its media items
    encoded_at: float = 0.0  # end of the last span that encode_s counts

    @property
    def width(self) -> int:
        """Number of slots that it needs."""
        return 1 if self.search is None else self.search.rules.width

    @property
    def num_embeddings(self) -> dict[bytes, int]:
        """Number of embeddings of each of its media items, by identifier."""
        return {item.identifier: item.num_embeddings for item in self.media}

    @property
    def num_encoder_rows(self) -> int:
        """Number of rows that the encoder computes for its media items, each identifier once."""
        return sum(self.num_embeddings.values()) if self.media else 0

    @property
    def is_suspect(self) -> bool:
        """Whether it may have killed several workers, and therefore runs alone."""
        return len(self.losses) > 1

    @property
    def num_tokens(self) -> int:
        """Number of tokens whose values are known."""
        return len(self.tokens)

    @property
    def has_prompt_only(self) -> bool:
        """Whether it has no output yet."""
        return self.num_tokens == self.num_prompt_tokens

    @property
    def has_output(self) -> bool:
        """Whether some of its output has been computed."""
        return not self.has_prompt_only or (self.search is not None and self.was_admitted)

    @property
    def has_optional_features(self) -> bool:
        """Whether it uses a feature that most sequences do not: log-probabilities, a grammar, beam search or repetition
        detection."""
        return bool(
            self.asks_logprobs
            or self.prompt_logprobs_from
            or self.grammar_id
            or self.is_beam
            or self.repetition is not None
        )

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Whether log-probabilities of its prompt are still due."""
        return 0 < self.prompt_logprobs_from < self.num_prompt_tokens

    def count_encoding(self, begin: float, end: float) -> None:
        """Adds a span in which one of its media items was encoded to `encode_s`; spans overlap, and end in their
        order."""
        self.encode_s += max(0.0, end - max(begin, self.encoded_at, self.queued_at))
        self.encoded_at = end

    def last_output(self, count: int) -> list[int]:
        """Returns the ids of the last output tokens, at most `count`, without tokens of the prompt."""
        end = self.num_tokens
        begin = max(end - count, self.num_prompt_tokens)
        return list(np.frombuffer(self.tokens.column(begin, end), dtype=np.int32).tolist())

    def hash_before(self, block: int) -> bytes:
        """Returns the hash of all tokens before the block with this index."""
        return self.block_hashes[block - 1] if block else self.root_hash

    def stop_token_id(self, token: int) -> int | None:
        """Returns the stop token to report, or None for end of sequence."""
        return token if token in self.stop_token_ids and token not in self.eos_token_ids else None
