"""Builds Submission messages: columns, block hashes, remaining time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.frontend.scheduler_client.sequence import (
    PromptHashes,
    PromptRequest,
    Sequence,
    supported_block_size,
)
from quire.shared import sampling_params
from quire.shared.columns import u32_bytes
from quire.shared.pb.common.v1 import model_pb2, sampling_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

KV_PRIORITIES = {"low": pb.KV_PRIORITY_LOW, "normal": pb.KV_PRIORITY_UNSPECIFIED, "high": pb.KV_PRIORITY_HIGH}


def build(sequences: Seq[Sequence], first_id: int, layout: model_pb2.BlockLayout, now: float) -> pb.Submission:
    """Returns the message for consecutive samples of one prompt without tokens, or for a single sequence. `now`: the
    event loop's clock, seconds."""
    first = sequences[0]
    request, sampling = first.prompt_request, first.prompt_request.sampling
    output = first.tokens.tobytes()
    return pb.Submission(
        first_sequence_id=first_id,
        num_sequences=len(sequences),
        request_id=request.request_id,
        traceparent=request.traceparent,
        token_ids=request.prompt + output,
        num_prompt_tokens=request.num_prompt_tokens,
        root_hash=request.hashes.root,
        block_hashes=_hashes(request.hashes, output, layout),
        params=request.params,
        first_sample=first.number,
        max_tokens=sampling.max_tokens,
        samples_nothing=request.samples_nothing,
        min_tokens=sampling.min_tokens,
        eos_token_ids=request.eos_token_ids,
        stop_token_ids=u32_bytes(sampling.stop_token_ids),
        repetition_detection=sampling.repetition_detection if sampling.HasField("repetition_detection") else None,
        skip_reading_prefix_cache=sampling.skip_reading_prefix_cache,
        asks_logprobs=sampling.HasField("logprobs") or bool(sampling.logprob_token_ids),
        prompt_logprobs_from=_prompt_logprobs_from(sampling, first),
        beam_search=sampling.beam_search if request.is_beam_search else None,
        num_logprobs=sampling.logprobs if request.is_beam_search and sampling.HasField("logprobs") else None,
        grammar=request.grammar,
        adapter=request.adapter.name if request.adapter else "",
        adapter_digest=request.adapter.digest if request.adapter else b"",
        priority=request.priority,
        kv_priority=KV_PRIORITIES[request.kv_priority],
        late_query=_late_query(request),
        media=request.media,
        tenant=request.tenant,
        timeout_ms=_timeout_ms(request.deadline_s, now),
        age_ms=max(0, int((now - request.arrival_s) * 1000)),
    )


def _prompt_logprobs_from(sampling: sampling_pb2.SamplingParams, first: Sequence) -> int:
    """Returns the first prompt position to report, for the first sample only; a resubmitted sequence skips those
    received."""
    position = sampling_params.first_prompt_logprob(sampling)
    return position + first.num_prompt_logprobs if position and not first.number else 0


def _hashes(hashes: PromptHashes, output: bytes, layout: model_pb2.BlockLayout) -> bytes:
    """Returns the block hashes; empty while the layout is unknown: the scheduler computes them then."""
    block_size = supported_block_size(layout)
    return b"".join(hashes.block_hashes_with_output(block_size, output)) if block_size else b""


def _late_query(request: PromptRequest) -> pb.LateQuery | None:
    query = request.late_query
    return None if query is None else pb.LateQuery(token_ids=query.tokens, params=query.params)


def _timeout_ms(deadline_s: float | None, now: float) -> int:
    """Returns the remaining time, at least 1 ms; 0 means no deadline."""
    return 0 if deadline_s is None else max(1, int((deadline_s - now) * 1000))
