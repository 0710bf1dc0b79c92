"""Values of the core's interface: step plans, step results and events. No wire format."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.shared.step_value import step_value

I32 = npt.NDArray[np.int32]
U32 = npt.NDArray[np.uint32]
F32 = npt.NDArray[np.float32]


class Admission(NamedTuple):
    """Sequence that gets a slot in this step, with all tokens that the worker has to know."""

    slot: int
    sequence: Sequence
    token_ids: bytes  # i32 column of all known tokens
    num_cached_tokens: int
    cross_blocks: Seq[int] = ()  # blocks of the encoder's output that the sequence attends to
    writes_cross: bool = False  # the worker writes them before this step


@dataclass(frozen=True, slots=True)
class BeamMove:
    """Continuation of the beam in `parent` in `slot`; both may be the same slot."""

    slot: int
    parent: int
    token: int  # the next token
    last_blocks: tuple[int, ...]  # block of each KV group that replaces the parent's last one; 0: keep it


@step_value
class StepPlan:
    """One forward pass. Contains only what the worker cannot derive (worker.proto)."""

    step_id: int
    num_tokens: int  # computed in this step, over all slots
    released_slots: list[int]
    admitted: list[Admission]
    counted_slots: list[int]  # ascending
    token_counts: list[int]
    new_block_ids: list[int]  # slots ascending
    num_draft_tokens: int | None = None  # maximum drafts per slot from this step on; None: unchanged
    new_block_slots: list[int] | None = None  # slots of the new blocks; None: the worker derives them
    copies: list[tuple[int, int]] = field(default_factory=list)  # (source, target) blocks to copy before the step
    beam_moves: list[BeamMove] = field(default_factory=list)  # slots ascending
    micro_batch: int = 0  # micro-batch whose slots compute without being named
    dropped_queries: list[bytes] = field(default_factory=list)  # query names to drop before anything of this step


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log-probabilities of the positions of sequences that asked: their entries, the sampled token first."""

    entry_counts: U32  # [num_positions]
    token_ids: I32  # [num_entries]
    logprobs: F32  # [num_entries] natural logarithm
    ranks: U32  # [num_positions]

    def select(self, positions: npt.NDArray[np.bool_]) -> Logprobs:
        """Returns the log-probabilities of the positions that a mask [num_positions] selects, all entries of each."""
        entries = np.repeat(positions, self.entry_counts)
        return Logprobs(
            self.entry_counts[positions], self.token_ids[entries], self.logprobs[entries], self.ranks[positions]
        )

    def split(self, counts: list[int]) -> list[Logprobs]:
        """Splits the positions into consecutive parts of `counts` positions each; every count is at least 1."""
        ends = np.cumsum(counts)[:-1]
        entry_ends = np.cumsum(self.entry_counts, dtype=np.intp)[ends - 1]  # every part has a position
        columns = (
            np.split(self.entry_counts, ends),
            np.split(self.token_ids, entry_ends),
            np.split(self.logprobs, entry_ends),
            np.split(self.ranks, ends),
        )
        return [Logprobs(*parts) for parts in zip(*columns, strict=True)]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the next prompt positions of some slots."""

    slots: U32
    position_counts: U32
    entries: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a forward pass: the sampled tokens of each slot that sampled, slots ascending."""

    step_id: int
    token_ids: I32
    token_counts: U32 | None = None  # tokens of each slot; None: one each
    draft_counts: U32 | None = None  # verified drafts of each slot; None: no drafts
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompts: PromptLogprobs | None = None
    pooled: Mapping[int, bytes] = field(
        default_factory=dict
    )  # f32 column by slot, of slots that ended without a sample


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """Vector that a pooling sequence ended with, or the score of a document."""

    sequence: Sequence
    values: bytes  # f32 column


@dataclass(frozen=True, slots=True)
class PromptLogprobsPart:
    """Log-probabilities of the next positions of a prompt, in order; a long prompt returns several parts."""

    sequence: Sequence
    entries: Logprobs


class SequenceStarted(NamedTuple):
    """First admission of a sequence, `queued_s` seconds after it was queued; for `encode_s` of them its media were
    encoded."""

    sequence: Sequence
    queued_s: float
    encode_s: float


class SequenceFinished(NamedTuple):
    """Terminal event of a sequence; each sequence has exactly one."""

    sequence: Sequence
    reason: Reason
    stop_token_id: int | None = None
    failure: Failure | None = None
    score: float | None = None  # of a beam search's result


def finished_events(
    sequence: Sequence, reason: Reason, stop_token_id: int | None = None, failure: Failure | None = None
) -> list[SequenceFinished]:
    """Returns the terminal events of a sequence, all with the same reason: one for each output that the frontend
    waits for, which is the sequence itself, or all outputs of a beam search."""
    return [SequenceFinished(output, reason, stop_token_id, failure) for output in sequence.outputs or (sequence,)]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Log-probabilities with the owner and sequence id of each position."""

    owners: I32
    sequence_ids: U32
    entries: Logprobs


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """New tokens of a step, row by row; a sequence has at most one row."""

    owners: I32
    sequence_ids: U32
    token_ids: I32
    token_counts: U32 | None = None  # tokens of each row; None: one each
    logprobs: LogprobColumns | None = None


@dataclass(slots=True)
class Events:
    """Events since the last take_events(), for the frontends."""

    prompts: list[PromptLogprobsPart] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)
    tokens: list[TokenColumns] = field(default_factory=list)
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    weight_version: str = ""  # version of the weights that computed the tokens, if known

    def __bool__(self) -> bool:
        return bool(self.tokens or self.started or self.finished or self.prompts or self.pooled)
