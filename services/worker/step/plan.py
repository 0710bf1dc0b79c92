"""Step plan in plain values (StepPlan of worker.proto)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.media_items import MediaItem
from quire.shared.columns import U32

NO_IDS: U32 = np.zeros(0, dtype=np.uint32)


def _no_ids() -> U32:
    return NO_IDS


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of a sequence to a slot, as a plan states it."""

    slot: int
    token_ids: bytes = b""  # i32 column: prompt tokens, then output tokens so far
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    params: bytes = b""  # serialized SequenceParams, written by the frontend for the worker
    sample: int = 0  # index of this sample within its request
    root_hash: bytes = b""
    grammar_id: bytes = b""  # empty: none
    prompt_logprobs_from: int = 0  # first prompt position whose log-probabilities are requested; 0: none
    samples_nothing: bool = False
    query_id: bytes = b""  # late interaction: its query, or the query it is scored against; empty: none
    is_query: bool = False
    num_logprobs: int | None = None  # overrides params; None: as in params
    media: Sequence[MediaItem] = ()  # media of the prompt, by offset
    cross_block_ids: U32 = field(default_factory=_no_ids)  # blocks of the encoder's output that it attends to
    writes_cross: bool = False  # they are written before the step


@dataclass(frozen=True, slots=True)
class PlanChanges:
    """Changes of a plan beyond "all rows of the previous step decode again"; empty fields change nothing."""

    released_slots: U32 = field(default_factory=_no_ids)  # ascending
    admitted: Sequence[Admission] = ()
    counted_slots: U32 = field(default_factory=_no_ids)  # ascending: slots with explicit token counts
    token_counts: U32 = field(default_factory=_no_ids)  # tokens of each counted slot
    num_draft_tokens: int | None = None  # maximum drafts of a slot from now on; None: unchanged
    copies: BlockCopies | None = None
    beams: BeamMoves | None = None
    dropped_queries: bytes = b""  # concatenated query names


NO_CHANGES = PlanChanges()


class StepPlan(NamedTuple):
    """Plan of one forward pass: what the worker cannot derive. A plan without changes holds NO_CHANGES itself."""

    epoch: int
    step_id: int
    new_block_ids: U32 = NO_IDS  # in ascending order of slots
    new_block_slots: U32 = NO_IDS  # slot of each new block; only for workers that draft
    micro_batch: int = 0  # micro-batch whose slots compute implicitly
    changes: PlanChanges = NO_CHANGES
