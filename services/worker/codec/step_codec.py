"""Conversion of step plans and results between the worker's plain values and worker.proto.

Decoding does not copy: columns are views of the message's bytes. Bytes that form no valid column raise ColumnError;
whether a plan fits the state of the slots is checked by the slot table (PlanViolation)."""

from __future__ import annotations

import numpy as np

from quire.services.worker.codec import media_codec
from quire.services.worker.step.beam_moves import BeamMoves
from quire.services.worker.step.block_copies import BlockCopies
from quire.services.worker.step.plan import NO_CHANGES, NO_IDS, Admission, PlanChanges, StepPlan
from quire.services.worker.step.result import NO_TIMINGS, LogprobEntries, StepResult
from quire.shared.columns import f32_bytes, i32, i32_bytes, u32, u32_bytes
from quire.shared.errors import to_proto
from quire.shared.pb.worker.v1 import worker_pb2 as pb

# Fields of a plan whose rows are those of the previous step, decoding one more token each.
UNCHANGED = frozenset({"epoch", "step_id", "new_block_ids", "new_block_slots", "micro_batch"})
NUM_NAMES = 2  # epoch and step_id: every plan has them, in this order before all other fields


def decode_plan(wire: pb.StepPlan) -> StepPlan:
    """Decodes a plan into views of the message's bytes; changes are NO_CHANGES if the same rows decode one token each.
    Raises ColumnError for bytes that form no column; does not check ids or slots."""
    fields = wire.ListFields()
    if len(fields) == NUM_NAMES and fields[-1][0].name == "step_id":  # most plans: the same rows decode
        return StepPlan(wire.epoch, wire.step_id, NO_IDS, NO_IDS, 0, NO_CHANGES)
    is_unchanged = all(field.name in UNCHANGED for field, _ in fields)
    ids, slots = u32(wire.new_block_ids), u32(wire.new_block_slots)
    changes = NO_CHANGES if is_unchanged else _decode_changes(wire)
    return StepPlan(wire.epoch, wire.step_id, ids, slots, wire.micro_batch, changes)


def _decode_changes(wire: pb.StepPlan) -> PlanChanges:
    """Decodes the fields of a plan that admits, releases or counts tokens, sets drafts, copies blocks or moves
    beams."""
    return PlanChanges(
        u32(wire.released_slots),
        [_decode_admission(admission) for admission in wire.admitted],
        u32(wire.counted_slots),
        u32(wire.token_counts),
        wire.num_draft_tokens if wire.HasField("num_draft_tokens") else None,
        _decode_copies(wire.copies) if wire.HasField("copies") else None,
        _decode_beams(wire.beams) if wire.HasField("beams") else None,
        wire.dropped_queries,
    )


def _decode_copies(wire: pb.BlockCopies) -> BlockCopies:
    return BlockCopies(u32(wire.from_block_ids), u32(wire.to_block_ids))


def _decode_beams(wire: pb.BeamMoves) -> BeamMoves:
    """Decodes beam moves; slots and parents become index arrays and token ids are copied, all others are views."""
    slots, parents = u32(wire.slots).astype(np.intp), u32(wire.parents).astype(np.intp)
    return BeamMoves(slots, parents, i32(wire.token_ids).copy(), u32(wire.last_block_ids))


def _decode_admission(wire: pb.Admission) -> Admission:
    return Admission(
        wire.slot,
        wire.token_ids,
        wire.num_prompt_tokens,
        wire.num_cached_tokens,
        wire.params,
        wire.sample,
        wire.root_hash,
        wire.grammar_id,
        wire.prompt_logprobs_from,
        wire.samples_nothing,
        wire.query_id,
        wire.is_query,
        wire.num_logprobs if wire.HasField("num_logprobs") else None,
        [media_codec.decode_item(item) for item in wire.media] if wire.media else (),
        u32(wire.cross_block_ids),
        wire.writes_cross,
    )


def encode_plan(plan: StepPlan) -> pb.StepPlan:
    """Encodes a plan for the other ranks of a replica, as the inverse of decode_plan()."""
    changes, beams = plan.changes, plan.changes.beams
    wire = pb.StepPlan(
        epoch=plan.epoch,
        step_id=plan.step_id,
        new_block_ids=u32_bytes(plan.new_block_ids),
        new_block_slots=u32_bytes(plan.new_block_slots),
        micro_batch=plan.micro_batch,
    )
    if changes is NO_CHANGES:
        return wire
    wire.released_slots = u32_bytes(changes.released_slots)
    wire.admitted.extend(_encode_admission(admission) for admission in changes.admitted)
    wire.counted_slots, wire.token_counts = u32_bytes(changes.counted_slots), u32_bytes(changes.token_counts)
    if changes.num_draft_tokens is not None:
        wire.num_draft_tokens = changes.num_draft_tokens
    if changes.copies is not None:
        wire.copies.from_block_ids = u32_bytes(changes.copies.sources)
        wire.copies.to_block_ids = u32_bytes(changes.copies.targets)
    if beams is not None:
        wire.beams.slots, wire.beams.parents = u32_bytes(beams.slots), u32_bytes(beams.parents)
        wire.beams.token_ids, wire.beams.last_block_ids = i32_bytes(beams.token_ids), u32_bytes(beams.last_block_ids)
    wire.dropped_queries = changes.dropped_queries
    return wire


def _encode_admission(admission: Admission) -> pb.Admission:
    wire = pb.Admission(
        slot=admission.slot,
        token_ids=admission.token_ids,
        num_prompt_tokens=admission.num_prompt_tokens,
        num_cached_tokens=admission.num_cached_tokens,
        params=admission.params,
        sample=admission.sample,
        root_hash=admission.root_hash,
        grammar_id=admission.grammar_id,
        prompt_logprobs_from=admission.prompt_logprobs_from,
        samples_nothing=admission.samples_nothing,
        query_id=admission.query_id,
        is_query=admission.is_query,
        media=[media_codec.encode_item(item) for item in admission.media],
        cross_block_ids=u32_bytes(admission.cross_block_ids),
        writes_cross=admission.writes_cross,
    )
    if admission.num_logprobs is not None:
        wire.num_logprobs = admission.num_logprobs
    return wire


def encode_result(result: StepResult) -> pb.StepResult:
    """Encodes a step's result for the scheduler; fields that are None or empty stay unset."""
    wire = pb.StepResult(epoch=result.epoch, step_id=result.step_id, token_ids=i32_bytes(result.token_ids))
    timings, encoded = result.timings, wire.timings
    if timings is not NO_TIMINGS:
        encoded.wait_us, encoded.prepare_us = result.wait_us, timings.prepare_us
        encoded.forward_us, encoded.sample_us = timings.forward_us, timings.sample_us
    if result.token_counts is not None:
        wire.token_counts = u32_bytes(result.token_counts)
    if result.draft_counts is not None:
        wire.draft_counts = u32_bytes(result.draft_counts)
    if result.failures:
        wire.failures.extend(pb.SlotFailure(slot=slot, error=to_proto(error)) for slot, error in result.failures)
    if result.logprobs is not None:
        wire.logprobs.CopyFrom(_encode_logprobs(result.logprobs))
    if result.prompt_logprobs is not None:
        prompts = result.prompt_logprobs
        wire.prompt_logprobs.slots = u32_bytes(prompts.slots)
        wire.prompt_logprobs.position_counts = u32_bytes(prompts.position_counts)
        wire.prompt_logprobs.entries.CopyFrom(_encode_logprobs(prompts.entries))
    if result.pooled is not None:
        pooled = result.pooled
        wire.pooled.slots, wire.pooled.sizes = u32_bytes(pooled.slots), u32_bytes(pooled.sizes)
        wire.pooled.values = f32_bytes(pooled.values)
    return wire


def _encode_logprobs(columns: LogprobEntries) -> pb.LogprobColumns:
    """Encodes entries of log probabilities as packed columns: counts per token, then ids, values and ranks of all
    entries."""
    return pb.LogprobColumns(
        entry_counts=u32_bytes(columns.entry_counts),
        token_ids=i32_bytes(columns.token_ids),
        logprobs=f32_bytes(columns.logprobs),
        ranks=u32_bytes(columns.ranks),
    )
