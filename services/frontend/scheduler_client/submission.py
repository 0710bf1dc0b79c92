"""PromptRequest as it is sent: columns, block hashes, what is left of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from quire.services.frontend.scheduler_client.prompt_hashes import PromptHashes, supported_block_size
from quire.services.frontend.scheduler_client.sequence import PromptRequest, Sequence
from quire.shared import prompt_logprobs
from quire.shared.columns import u32_bytes
from quire.shared.pb.common.v1 import model_pb2, sampling_pb2
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

KV_PRIORITIES = {"low": pb.KV_PRIORITY_LOW, "normal": pb.KV_PRIORITY_UNSPECIFIED, "high": pb.KV_PRIORITY_HIGH}


def build(sequences: Seq[Sequence], first_id: int, layout: model_pb2.BlockLayout, now: float) -> pb.Submission:
    """`sequences`: consecutive samples of one work that have no tokens yet, or a single one with or without."""
    first = sequences[0]
    work, sampling = first.prompt_request, first.prompt_request.sampling
    output = first.tokens.tobytes()
    return pb.Submission(
        first_sequence_id=first_id,
        num_sequences=len(sequences),
        request_id=work.request_id,
        traceparent=work.traceparent,
        token_ids=work.prompt + output,
        num_prompt_tokens=work.num_prompt_tokens,
        root_hash=work.hashes.root,
        block_hashes=_hashes(work.hashes, output, layout),
        params=work.params,
        first_sample=first.number,
        max_tokens=sampling.max_tokens,
        samples_nothing=work.samples_nothing,
        min_tokens=sampling.min_tokens,
        eos_token_ids=work.eos_token_ids,
        stop_token_ids=u32_bytes(sampling.stop_token_ids),
        repetition_detection=sampling.repetition_detection if sampling.HasField("repetition_detection") else None,
        skip_reading_prefix_cache=sampling.skip_reading_prefix_cache,
        asks_logprobs=sampling.HasField("logprobs") or bool(sampling.logprob_token_ids),
        prompt_logprobs_from=_prompt_logprobs_from(sampling, first),
        beam_search=sampling.beam_search if work.is_beam_search else None,
        num_logprobs=sampling.logprobs if work.is_beam_search and sampling.HasField("logprobs") else None,
        grammar=work.grammar,
        adapter=work.adapter.name if work.adapter else "",
        adapter_digest=work.adapter.digest if work.adapter else b"",
        priority=work.priority,
        kv_priority=KV_PRIORITIES[work.kv_priority],
        late_query=_late_query(work),
        tenant=work.tenant,
        timeout_ms=_timeout_ms(work.deadline_s, now),
        age_ms=max(0, int((now - work.arrival_s) * 1000)),
    )


def _prompt_logprobs_from(sampling: sampling_pb2.SamplingParams, first: Sequence) -> int:
    """The first sample asks for them, and goes on behind those that have come."""
    position = prompt_logprobs.first_position(sampling)
    return position + first.num_prompt_logprobs if position and not first.number else 0


def _hashes(hashes: PromptHashes, output: bytes, layout: model_pb2.BlockLayout) -> bytes:
    """Empty while the layout is unknown: the scheduler then computes them."""
    block_size = supported_block_size(layout)
    return b"".join(hashes.block_hashes_with_output(block_size, output)) if block_size else b""


def _late_query(work: PromptRequest) -> pb.LateQuery | None:
    query = work.late_query
    return None if query is None else pb.LateQuery(token_ids=query.tokens, params=query.params)


def _timeout_ms(deadline_s: float | None, now: float) -> int:
    """At least 1: 0 means no deadline."""
    return 0 if deadline_s is None else max(1, int((deadline_s - now) * 1000))
