"""A step as its scheduler plans it, in plain values: what worker.proto's StepPlan says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.shared.columns import U32

NO_IDS: U32 = np.zeros(0, dtype=np.uint32)


def _no_ids() -> U32:
    return NO_IDS


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence that gets a slot."""

    slot: int
    token_ids: bytes = b""  # i32 column: every known token, the prompt, then output so far
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    params: bytes = b""  # a serialized SequenceParams, which the frontend has written for the worker alone
    sample: int = 0  # number of this sample among those of its request
    root_hash: bytes = b""
    grammar_id: bytes = b""  # empty: none
    prompt_logprobs_from: int = 0  # first position of the prompt whose log-probabilities are wanted; 0: none
    samples_nothing: bool = False
    query_id: bytes = b""  # that it is, or is compared with; empty: neither
    is_query: bool = False
    num_logprobs: int | None = None  # in place of what params say; None: as they say


@dataclass(frozen=True, slots=True)
class PlanChanges:
    """What a plan says beyond that the rows of the step before decode again."""

    released_slots: U32 = field(default_factory=_no_ids)  # ascending
    admitted: Sequence[Admission] = ()
    counted_slots: U32 = field(default_factory=_no_ids)  # ascending: those that do not do what is implied
    token_counts: U32 = field(default_factory=_no_ids)  # of each counted slot
    num_draft_tokens: int | None = None  # most drafts of a slot from now on; None: as before
    copies: BlockCopies | None = None
    beams: BeamMoves | None = None
    dropped_queries: bytes = b""  # names, one after the other


NO_CHANGES = PlanChanges()


class StepPlan(NamedTuple):
    """One forward pass: what the worker cannot derive. A plan without changes has NO_CHANGES itself."""

    epoch: int
    step_id: int
    new_block_ids: U32 = NO_IDS  # slots ascending
    new_block_slots: U32 = NO_IDS  # whose they are, where a worker drafts
    micro_batch: int = 0  # whose slots compute unnamed
    changes: PlanChanges = NO_CHANGES
