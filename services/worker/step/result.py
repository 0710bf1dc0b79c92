"""What came of a step, in plain values: what worker.proto's StepResult says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from quire.shared.columns import F32, I32, U32
from quire.shared.errors import QuireError


@dataclass(frozen=True, slots=True)
class LogprobEntries:
    """Log-probabilities, position after position: the entries of each, its own token's first."""

    entry_counts: U32  # [num_positions]
    token_ids: I32  # [num_entries]
    logprobs: F32  # [num_entries] natural logarithms
    ranks: U32  # [num_positions] of its own token, from 1


@dataclass(frozen=True, slots=True)
class PromptLogprobColumns:
    """Log-probabilities of the next positions of some prompts."""

    slots: U32
    position_counts: U32  # of each slot
    entries: LogprobEntries


@dataclass(frozen=True, slots=True)
class PooledColumns:
    """Vectors of slots that sample nothing, one after the other."""

    slots: U32  # ascending
    sizes: U32  # elements of each
    values: F32


class DeviceTimings(Protocol):
    """What a step took on the device."""

    @property
    def prepare_us(self) -> int: ...

    @property
    def forward_us(self) -> int: ...

    @property
    def sample_us(self) -> int: ...


class NoTimings:
    """Of steps that no device computes."""

    prepare_us = forward_us = sample_us = 0


NO_TIMINGS = NoTimings()


class StepResult(NamedTuple):
    """How a pass went: the tokens of each slot that sampled, slots ascending."""

    epoch: int
    step_id: int
    token_ids: I32  # -1 where nothing could be chosen
    token_counts: U32 | None  # of each slot; None: one
    draft_counts: U32 | None  # drafts of each slot that were verified; None: the step had none
    failures: list[tuple[int, QuireError]]  # by slot
    wait_us: int  # from a plan's arrival to its launch
    timings: DeviceTimings = NO_TIMINGS
    logprobs: LogprobEntries | None = None
    prompt_logprobs: PromptLogprobColumns | None = None
    pooled: PooledColumns | None = None
