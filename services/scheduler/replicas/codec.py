"""Conversion of step plans, orders and results between the core's values and worker.proto."""

from __future__ import annotations

from itertools import accumulate, pairwise

from quire.services.scheduler.core.plan import Admission, Logprobs, PromptLogprobs, StepPlan, StepResult
from quire.services.scheduler.core.prerequisites.encoder_outputs import EncoderOrder
from quire.services.scheduler.core.prerequisites.grammars import GrammarOrder
from quire.services.scheduler.core.prerequisites.peer_blocks import FetchOrder
from quire.services.scheduler.core.sequences.ending import Failure
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.transfers.orders import DiskOrder, TransferOrder
from quire.services.scheduler.values.payload import MediaSource, Payload
from quire.shared.columns import NUMBER_BYTES, f32, i32, i32_bytes, u32, u32_bytes
from quire.shared.kv import block_hash
from quire.shared.kv.kv_source import KVSource
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.worker.v1 import worker_pb2 as pb


def encode_plan(plan: StepPlan, epoch: int) -> pb.AttachResponse:
    """Returns a step plan as a message to the worker; empty columns and unchanged values are left unset. `epoch`:
    the attachment's."""
    message = pb.AttachResponse()
    wire = message.plan
    wire.epoch = epoch
    wire.step_id = plan.step_id
    if plan.released_slots:
        wire.released_slots = u32_bytes(plan.released_slots)
    if plan.counted_slots:
        wire.counted_slots = u32_bytes(plan.counted_slots)
        wire.token_counts = u32_bytes(plan.token_counts)
    if plan.new_block_ids:
        wire.new_block_ids = u32_bytes(plan.new_block_ids)
    if plan.num_draft_tokens is not None:
        wire.num_draft_tokens = plan.num_draft_tokens
    if plan.micro_batch:
        wire.micro_batch = plan.micro_batch
    if plan.new_block_slots:
        wire.new_block_slots = u32_bytes(plan.new_block_slots)
    if plan.copies:
        wire.copies.from_block_ids = u32_bytes([block for block, _ in plan.copies])
        wire.copies.to_block_ids = u32_bytes([block for _, block in plan.copies])
    if plan.beam_moves:
        wire.beams.slots = u32_bytes([move.slot for move in plan.beam_moves])
        wire.beams.parents = u32_bytes([move.parent for move in plan.beam_moves])
        wire.beams.token_ids = i32_bytes([move.token for move in plan.beam_moves])
        wire.beams.last_block_ids = u32_bytes([block for move in plan.beam_moves for block in move.last_blocks])
    if plan.dropped_queries:
        wire.dropped_queries = b"".join(plan.dropped_queries)
    for admission in plan.admitted:
        _encode_admission(wire.admitted.add(), admission)
    return message


def _encode_admission(wire: pb.Admission, admission: Admission) -> None:
    """Fills the wire message of an admitted sequence: known tokens, sampling parameters, and the features that it
    uses."""
    sequence, payload = admission.sequence, admission.sequence.payload
    assert isinstance(payload, Payload)
    wire.slot = admission.slot
    wire.sequence_key = sequence.key % 2**64  # keys of beams are negative
    wire.token_ids = admission.token_ids
    wire.num_prompt_tokens = sequence.num_prompt_tokens
    wire.num_cached_tokens = admission.num_cached_tokens
    wire.params = payload.params
    wire.sample = payload.sample
    wire.root_hash = sequence.root_hash
    wire.grammar_id = sequence.grammar_id
    if sequence.asks_prompt_logprobs:  # positions already returned are not requested again
        wire.prompt_logprobs_from = sequence.prompt_logprobs_from
    if sequence.samples_nothing:
        wire.samples_nothing = True
    if sequence.query is not None:
        wire.query_id, wire.is_query = sequence.query.name, sequence.is_query
    if payload.num_logprobs is not None:
        wire.num_logprobs = payload.num_logprobs
    for item in sequence.media:
        wire.media.append(_source(item).item)
    if admission.cross_blocks:
        wire.cross_block_ids, wire.writes_cross = u32_bytes(admission.cross_blocks), admission.writes_cross


def encode_order(order: GrammarOrder) -> pb.AttachResponse:
    """Returns a grammar order as a message to the worker: prepare the grammar, or release it."""
    if order.sequence is None:
        return pb.AttachResponse(release_grammar=pb.ReleaseGrammar(grammar_id=order.grammar_id))
    payload = order.sequence.payload
    assert isinstance(payload, Payload)
    prepare = pb.PrepareGrammar(grammar_id=order.grammar_id, grammar=payload.grammar)
    return pb.AttachResponse(prepare_grammar=prepare)


def encode_encoder_order(order: EncoderOrder) -> pb.AttachResponse:
    """Returns an encoder order as a message to the worker: fetch and encode the media item, or release its rows."""
    if order.item is None:
        return pb.AttachResponse(release_media=pb.ReleaseMedia(identifier=order.identifier))
    source = _source(order.item)
    return pb.AttachResponse(prepare_media=pb.PrepareMedia(item=source.item, address=source.address))


def _source(item: MediaItem) -> MediaSource:
    assert isinstance(item.payload, MediaSource)
    return item.payload


def encode_transfer(order: TransferOrder | DiskOrder) -> pb.AttachResponse:
    """Returns a transfer order between device and host memory, or host memory and disk, as a message to the worker."""
    if isinstance(order, DiskOrder):
        return pb.AttachResponse(disk_transfer=_disk_transfer(order))
    hashes, groups = block_hash.join_names(order.hashes)
    transfer = pb.Transfer(
        transfer_id=order.transfer_id,
        to_host=order.to_host,
        block_ids=u32_bytes(order.blocks),
        place_ids=u32_bytes(order.places),
        block_hashes=hashes,
        block_groups=groups,
    )
    return pb.AttachResponse(transfer=transfer)


def _disk_transfer(order: DiskOrder) -> pb.DiskTransfer:
    """Returns the wire message of a transfer between host memory and disk."""
    hashes, groups = block_hash.join_names(order.hashes)
    return pb.DiskTransfer(
        transfer_id=order.transfer_id,
        to_disk=order.to_disk,
        place_ids=u32_bytes(order.places),
        disk_place_ids=u32_bytes(order.disk_places),
        block_hashes=hashes,
        block_groups=groups,
    )


def encode_fetch(order: FetchOrder) -> pb.AttachResponse:
    """Returns a fetch order as a message to the worker: address, epoch and lent blocks of the lender, and the local
    target blocks."""
    source, loan = order.borrowed.source, order.borrowed.loan
    assert isinstance(source, KVSource)
    fetch = pb.FetchBlocks(
        fetch_id=order.fetch_id,
        worker_id=source.worker_id,
        address=source.address,
        epoch=source.epoch,
        after_step=loan.after_step,
        from_block_ids=u32_bytes(loan.blocks),
        to_block_ids=u32_bytes(order.blocks),
        block_hashes=b"".join(order.hashes),
    )
    return pb.AttachResponse(fetch_blocks=fetch)


def decode_failure(error: finish_pb2.Error) -> Failure:
    return Failure(_code(error.code), error.message, error.retry_after_ms)


def decode_result(wire: pb.StepResult) -> StepResult:
    """Returns a worker's step result as the core's value; the columns are views of the message. Lengths must have
    been checked (result_checks.py)."""
    failures = [(failure.slot, decode_failure(failure.error)) for failure in wire.failures]
    logprobs = _decode_logprobs(wire.logprobs) if wire.HasField("logprobs") else None
    counts = u32(wire.token_counts) if wire.token_counts else None
    drafts = u32(wire.draft_counts) if wire.draft_counts else None
    prompts = _decode_prompts(wire.prompt_logprobs) if wire.HasField("prompt_logprobs") else None
    pooled = _decode_pooled(wire.pooled) if wire.HasField("pooled") else {}
    return StepResult(wire.step_id, i32(wire.token_ids), counts, drafts, failures, logprobs, prompts, pooled)


def _code(code: int) -> str:
    """Returns the name of an error code; an unknown code counts as an internal error of the worker."""
    if code not in finish_pb2.ErrorCode.values():
        code = finish_pb2.ERROR_CODE_INTERNAL
    return finish_pb2.ErrorCode.Name(code).removeprefix("ERROR_CODE_")


def _decode_prompts(wire: pb.PromptLogprobColumns) -> PromptLogprobs:
    return PromptLogprobs(u32(wire.slots), u32(wire.position_counts), _decode_logprobs(wire.entries))


def _decode_pooled(wire: pb.PooledColumns) -> dict[int, bytes]:
    """Returns the vectors of pooling sequences as f32 columns by slot."""
    sizes = u32(wire.sizes).tolist()
    ends = list(accumulate((size * NUMBER_BYTES for size in sizes), initial=0))
    values = wire.values  # reading the field copies it
    parts = (values[begin:end] for begin, end in pairwise(ends))
    return dict(zip(u32(wire.slots).tolist(), parts, strict=True))


def _decode_logprobs(wire: pb.LogprobColumns) -> Logprobs:
    return Logprobs(u32(wire.entry_counts), i32(wire.token_ids), f32(wire.logprobs), u32(wire.ranks))
