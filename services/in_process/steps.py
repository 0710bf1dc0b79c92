"""Conversion of steps between the values of a scheduler's core and those of a worker's replica, without encoding."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from quire.services.scheduler.core.plan import Admission as CoreAdmission
from quire.services.scheduler.core.plan import BeamMove, Logprobs, PromptLogprobs
from quire.services.scheduler.core.plan import StepPlan as CorePlan
from quire.services.scheduler.core.plan import StepResult as CoreResult
from quire.services.scheduler.core.sequences.ending import Failure
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.services.worker.codec.media_codec import decode_item
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.fetched_item import FetchedItem, Pixels
from quire.services.worker.step.plan import NO_CHANGES, Admission, PlanChanges, StepPlan
from quire.services.worker.step.result import LogprobEntries, PooledColumns, StepResult
from quire.shared.errors import QuireError
from quire.shared.pb.common.v1 import finish_pb2

EPOCH = 1


def plan_for_worker(plan: CorePlan) -> StepPlan:
    ids, slots = np.array(plan.new_block_ids, np.uint32), np.array(plan.new_block_slots or (), np.uint32)
    return StepPlan(EPOCH, plan.step_id, ids, slots, plan.micro_batch, _changes(plan))


def result_for_core(result: StepResult) -> CoreResult:
    """Returns a worker's result as the core's value. Copies the token ids, whose memory the next step overwrites;
    the other columns are shared."""
    counts, drafts, prompts = result.token_counts, result.draft_counts, result.prompt_logprobs
    return CoreResult(
        result.step_id,
        result.token_ids.copy(),  # the next step overwrites this memory
        counts,
        drafts,
        [(slot, failure_of(error)) for slot, error in result.failures],
        _logprobs(result.logprobs) if result.logprobs is not None else None,
        PromptLogprobs(prompts.slots, prompts.position_counts, _logprobs(prompts.entries)) if prompts else None,
        _pooled(result.pooled) if result.pooled is not None else {},
    )


def failure_of(error: QuireError) -> Failure:
    code = finish_pb2.ErrorCode.Name(error.code).removeprefix("ERROR_CODE_")
    return Failure(code, error.message, error.retry_after_ms)


def _changes(plan: CorePlan) -> PlanChanges:
    """Returns everything of a plan that is not in every step (admissions, releases, counts, copies, beams); the
    shared constant NO_CHANGES if there is nothing."""
    drafts = plan.num_draft_tokens
    has_changes = plan.released_slots or plan.admitted or plan.counted_slots or plan.copies or plan.beam_moves
    if not has_changes and drafts is None and not plan.dropped_queries:
        return NO_CHANGES
    return PlanChanges(
        np.array(plan.released_slots, np.uint32),
        [_admission(admission) for admission in plan.admitted],
        np.array(plan.counted_slots, np.uint32),
        np.array(plan.token_counts, np.uint32),
        drafts,
        _copies(plan.copies) if plan.copies else None,
        _beams(plan.beam_moves) if plan.beam_moves else None,
        b"".join(plan.dropped_queries),
    )


def _copies(copies: list[tuple[int, int]]) -> BlockCopies:
    sources, targets = zip(*copies, strict=True)
    return BlockCopies(np.array(sources, np.uint32), np.array(targets, np.uint32))


def _beams(moves: list[BeamMove]) -> BeamMoves:
    """Returns beam moves as columns, one row per move; last_blocks has one entry per move and KV group."""
    return BeamMoves(
        np.array([move.slot for move in moves], np.intp),
        np.array([move.parent for move in moves], np.intp),
        np.array([move.token for move in moves], np.int32),
        np.array([block for move in moves for block in move.last_blocks], np.uint32),
    )


def _admission(admission: CoreAdmission) -> Admission:
    """Returns a core's admission with the sampling parameters of the sequence's payload, as the worker's replica
    expects it."""
    sequence, payload, query = admission.sequence, admission.sequence.payload, admission.sequence.query
    assert isinstance(payload, Payload)
    return Admission(
        admission.slot,
        admission.token_ids,
        sequence.num_prompt_tokens,
        admission.num_cached_tokens,
        payload.params,
        payload.sample,
        sequence.root_hash,
        sequence.grammar_id,
        sequence.prompt_logprobs_from if sequence.asks_prompt_logprobs else 0,
        sequence.samples_nothing,
        b"" if query is None else query.name,
        query is not None and sequence.is_query,
        payload.num_logprobs,
        [decode_item(_media_source(item).item) for item in sequence.media],
        np.array(admission.cross_blocks, np.uint32),
        admission.writes_cross,
    )


def fetched_item(item: MediaItem, pixels: Pixels) -> FetchedItem:
    """Returns a core's media item with its pixels, as the worker's replica encodes it."""
    layout = decode_item(_media_source(item).item).layout
    return FetchedItem(item.identifier, item.num_embeddings, layout, pixels)


def _media_source(item: MediaItem) -> MediaSource:
    assert isinstance(item.payload, MediaSource)
    return item.payload


def _logprobs(columns: LogprobEntries) -> Logprobs:
    return Logprobs(columns.entry_counts, columns.token_ids, columns.logprobs, columns.ranks)


def _pooled(columns: PooledColumns) -> Mapping[int, bytes]:
    """Returns the vectors of pooling sequences as f32 columns by slot."""
    ends = np.cumsum([0, *columns.sizes.tolist()]).tolist()
    parts = [columns.values[begin:end].tobytes() for begin, end in pairwise(ends)]
    return dict(zip(columns.slots.tolist(), parts, strict=True))
