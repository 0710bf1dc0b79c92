"""What a core orders, what it is told, and what came of it: plain values, no wire format."""

from __future__ import annotations

from collections.abc import Mapping
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
    """A sequence that gets a slot in this step."""

    slot: int
    sequence: Sequence
    token_ids: bytes  # i32 column: every known token
    num_cached_tokens: int


@dataclass(frozen=True, slots=True)
class BeamMove:
    """The beam in `slot` goes on from the one in `parent`, which may be itself."""

    slot: int
    parent: int
    token: int  # its next one
    last_blocks: tuple[int, ...]  # of each KV group, in place of the parent's last one; 0: that


@step_value
class StepPlan:
    """One forward pass. Says only what the worker cannot derive (worker.proto)."""

    step_id: int
    num_tokens: int  # computed in this step, all slots
    released_slots: list[int]
    admitted: list[Admission]
    counted_slots: list[int]  # ascending
    token_counts: list[int]
    new_block_ids: list[int]  # slots ascending
    num_draft_tokens: int | None = None  # most drafts per slot from now on; None: as before
    new_block_slots: list[int] | None = None  # whose they are; None: the worker knows
    copies: list[tuple[int, int]] = field(default_factory=list)  # before the step: content of one block, to another
    beam_moves: list[BeamMove] = field(default_factory=list)  # slots ascending
    micro_batch: int = 0  # whose slots compute unnamed
    dropped_queries: list[bytes] = field(default_factory=list)  # names, before anything of this step


@dataclass(frozen=True, slots=True)
class Logprobs:
    """For each position whose sequence asked: its entries, the sampled token first."""

    entry_counts: U32  # one for each position
    token_ids: I32  # one for each entry
    logprobs: F32  # one for each entry, natural logarithm
    ranks: U32  # one for each position

    def select(self, positions: npt.NDArray[np.bool_]) -> Logprobs:
        """Those of some positions."""
        entries = np.repeat(positions, self.entry_counts)
        return Logprobs(
            self.entry_counts[positions], self.token_ids[entries], self.logprobs[entries], self.ranks[positions]
        )

    def split(self, counts: list[int]) -> list[Logprobs]:
        """Parts of so many positions each."""
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
    """What a step told of prompts: the next positions of some slots."""

    slots: U32
    position_counts: U32
    entries: Logprobs


@dataclass(frozen=True, slots=True)
class StepResult:
    """How that pass went: the sampled tokens of each slot that reached its end, slots ascending."""

    step_id: int
    token_ids: I32
    token_counts: U32 | None = None  # of each slot; None: one
    draft_counts: U32 | None = None  # drafts of each slot that were looked at; None: there were none
    failures: list[tuple[int, Failure]] = field(default_factory=list)
    logprobs: Logprobs | None = None
    prompts: PromptLogprobs | None = None
    pooled: Mapping[int, bytes] = field(default_factory=dict)  # f32 column, by slot that ended without a sample


@dataclass(frozen=True, slots=True)
class PooledOutput:
    """The vector that a sequence ended with, or the number of a document that was compared."""

    sequence: Sequence
    values: bytes  # f32 column


@dataclass(frozen=True, slots=True)
class PromptLogprobsPart:
    """The next positions of a prompt, with their log-probabilities."""

    sequence: Sequence
    entries: Logprobs


class SequenceStarted(NamedTuple):
    """A sequence left the queue for the first time."""

    sequence: Sequence
    queued_s: float


class SequenceFinished(NamedTuple):
    """The one terminal event of a sequence."""

    sequence: Sequence
    reason: Reason
    stop_token_id: int | None = None
    failure: Failure | None = None
    score: float | None = None  # of a beam search's result


def finished_events(
    sequence: Sequence, reason: Reason, stop_token_id: int | None = None, failure: Failure | None = None
) -> list[SequenceFinished]:
    """One for each that its frontend waits for."""
    return [SequenceFinished(output, reason, stop_token_id, failure) for output in sequence.outputs or (sequence,)]


@dataclass(frozen=True, slots=True)
class LogprobColumns:
    """Whose they are, one for each position, and the entries."""

    owners: I32
    sequence_ids: U32
    entries: Logprobs


@dataclass(frozen=True, slots=True)
class TokenColumns:
    """New tokens of a step, row after row; a sequence has at most one row."""

    owners: I32
    sequence_ids: U32
    token_ids: I32
    token_counts: U32 | None = None  # of each row; None: one
    logprobs: LogprobColumns | None = None


@dataclass(slots=True)
class Events:
    """What happened since the last look, for the frontends."""

    prompts: list[PromptLogprobsPart] = field(default_factory=list)
    pooled: list[PooledOutput] = field(default_factory=list)
    tokens: list[TokenColumns] = field(default_factory=list)
    started: list[SequenceStarted] = field(default_factory=list)
    finished: list[SequenceFinished] = field(default_factory=list)
    weight_version: str = ""  # of the weights that computed it, where that is known

    def __bool__(self) -> bool:
        return bool(self.tokens or self.started or self.finished or self.prompts or self.pooled)
