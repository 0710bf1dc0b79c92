"""Step result in plain values (StepResult of worker.proto)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.shared.columns import F32, I32, U32
from quire.shared.errors import QuireError


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Log-probabilities by position; the entry of the position's own token comes first."""

    entry_counts: U32  # [num_positions]
    token_ids: I32  # [num_entries]
    logprobs: F32  # [num_entries] natural logarithms
    ranks: U32  # [num_positions] rank of the position's own token, from 1


@dataclass(frozen=True, slots=True)
class PromptLogprobColumns:
    """Log-probabilities of prompt positions that a step has computed, slot after slot."""

    slots: U32
    position_counts: U32  # of each slot
    entries: LogprobEntries


@dataclass(frozen=True, slots=True)
class PooledColumns:
    """Concatenated vectors of pooled slots."""

    slots: U32  # ascending
    sizes: U32  # elements of each vector
    values: F32


class DeviceTimings(Protocol):
    """Device time of a step by phase, in microseconds."""

    @property
    def prepare_us(self) -> int: ...

    @property
    def forward_us(self) -> int: ...

    @property
    def sample_us(self) -> int: ...


class NoTimings:
    """Timings of steps that run on no device."""

    prepare_us = forward_us = sample_us = 0


NO_TIMINGS = NoTimings()


class StepResult(NamedTuple):
    """Result of a forward pass: the tokens of each sampling slot, in ascending order of slots, and what heads have
    computed."""

    epoch: int
    step_id: int
    token_ids: I32  # -1 if no token could be sampled
    token_counts: U32 | None  # tokens of each slot; None: one each
    draft_counts: U32 | None  # verified drafts of each slot; None: the step had no drafts
    failures: list[tuple[int, QuireError]]  # by slot
    wait_us: int  # from a plan's arrival to its launch
    timings: DeviceTimings = NO_TIMINGS
    logprobs: LogprobEntries | None = None
    prompt_logprobs: PromptLogprobColumns | None = None
    pooled: PooledColumns | None = None
