"""A sequence: one stream of tokens, the unit that is scheduled."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from quire.services.scheduler.core.sequences.repetition import RepetitionRule
from quire.services.scheduler.core.sequences.tokens import TOKEN_BYTES, SequenceTokens
from quire.services.scheduler.kv_cache.kv_priority import KVPriority

if TYPE_CHECKING:
    from quire.services.scheduler.core.sequences.beam_search import BeamSearchState


class SequenceStatus(Enum):
    """State of a sequence."""

    BLOCKED = "blocked"
    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class WorkerLoss(NamedTuple):
    """An attachment of a worker that ended, and not of the worker's own will."""

    worker_id: str
    epoch: int


@dataclass(slots=True, eq=False)
class SampleGroup:
    """The samples of one prompt. Compared by identity."""

    replica: object = None  # the replica that the last of them went to; not looked at here


@dataclass(frozen=True, slots=True, eq=False)
class LateQuery:
    """Query that documents are compared with, token by token."""

    name: bytes  # 32 bytes; equal queries have the same
    tokens: bytes  # i32 column
    payload: object = None  # what the worker needs beside them; not looked at here

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES


@dataclass(slots=True, eq=False)
class Sequence:
    """One stream of tokens: what a client asked for, and where it stands."""

    key: int  # unique in the scheduler's lifetime
    owner: int  # the frontend session it belongs to
    sequence_id: int  # its number in that session
    tokens: SequenceTokens  # prompt, then output
    num_prompt_tokens: int
    max_total_tokens: int  # prompt and output together
    stop_token_ids: tuple[int, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    root_hash: bytes = b""
    block_hashes: list[bytes] = field(default_factory=list)  # of all full blocks of `tokens`
    skip_reading_prefix_cache: bool = False
    asks_logprobs: bool = False
    samples_nothing: bool = False  # it ends, with a vector, when its tokens are computed
    prompt_logprobs_from: int = 0  # the next prompt position whose log-probabilities are to come; 0: nobody asked
    repetition: RepetitionRule | None = None
    min_output_tokens: int = 0  # no repetition is seen before
    grammar_id: bytes = b""  # what constrains its output; empty: nothing
    grammar_bytes: int = 0  # of its text
    query: LateQuery | None = None  # that it is compared with, or that it computes
    is_query: bool = False  # it does the latter, for documents; no frontend knows it (late_queries.py)
    adapter: object = None  # what only some workers have and it needs; not looked at here
    sample_group: SampleGroup | None = None  # if it has siblings
    search: BeamSearchState | None = None  # of a root: it runs as beams (beam/beams.py)
    outputs: list[Sequence] = field(default_factory=list)  # of a root: what the frontend gets, itself first
    num_logprobs: int | None = None  # of a root: asked for beside each token's own
    is_beam: bool = False  # of a search; nobody but that knows it
    payload: object = None  # what the worker needs beside the tokens; not looked at here
    request_id: str = ""
    priority: int = 0
    kv_priority: KVPriority = KVPriority.NORMAL
    tenant: str = ""
    arrival: float = 0.0  # at the frontend: seconds, the scheduler's clock
    queued_at: float = 0.0  # when it came to this scheduler
    deadline: float = math.inf

    status: SequenceStatus = SequenceStatus.WAITING
    slot: int = -1
    order: int = -1  # arrival rank within a core
    tenant_index: int = 0  # of its tenant within a policy
    urgency: float = 0.0  # under the priority policy: smaller comes first
    fence: int = 0  # step that must have returned before it may run again
    num_preemptions: int = 0
    restart_points: tuple[
        int, ...
    ] = ()  # of its prompt, leading blocks behind which others may start (transfers/reach.py)
    num_fetches: int = 0  # times that blocks of it were brought back from host memory
    losses: tuple[WorkerLoss, ...] = ()  # in a row, without a token in between
    moved_at: float | None = None  # its last token on a worker that it had to leave; None once it goes on
    num_queued_tokens: int = 0  # num_tokens when it was last put into the queue
    num_cached_tokens: int = 0  # at its first admission
    was_admitted: bool = False

    @property
    def width(self) -> int:
        """Slots that it takes."""
        return 1 if self.search is None else self.search.rules.width

    @property
    def is_suspect(self) -> bool:
        """Whether it may be what kills workers, and so runs alone."""
        return len(self.losses) > 1

    @property
    def num_tokens(self) -> int:
        """Tokens whose values are known."""
        return len(self.tokens)

    @property
    def has_prompt_only(self) -> bool:
        """Whether it has nothing but its prompt."""
        return self.num_tokens == self.num_prompt_tokens

    @property
    def has_output(self) -> bool:
        """Some of its output has been computed."""
        return not self.has_prompt_only or (self.search is not None and self.was_admitted)

    @property
    def has_optional_features(self) -> bool:
        """Than tokens, and one at a time, as nearly all do not."""
        return bool(
            self.asks_logprobs
            or self.prompt_logprobs_from
            or self.grammar_id
            or self.is_beam
            or self.repetition is not None
        )

    @property
    def asks_prompt_logprobs(self) -> bool:
        """Some are still to come."""
        return 0 < self.prompt_logprobs_from < self.num_prompt_tokens

    def last_output(self, count: int) -> list[int]:
        """Returns its last output tokens, at most `count`."""
        end = self.num_tokens
        begin = max(end - count, self.num_prompt_tokens)
        return list(np.frombuffer(self.tokens.column(begin, end), dtype=np.int32).tolist())

    def hash_before(self, block: int) -> bytes:
        """Returns the hash of all that comes before the block of that number."""
        return self.block_hashes[block - 1] if block else self.root_hash

    def stop_token_id(self, token: int) -> int | None:
        """The stop token to report: none for end of sequence."""
        return token if token in self.stop_token_ids and token not in self.eos_token_ids else None
