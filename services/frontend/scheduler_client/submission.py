"""Work as it is sent: columns, block hashes, what is left of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.frontend.scheduler_client.prompt_hashes import PromptHashes, known_block_size
from services.frontend.scheduler_client.sequence import Sequence
from shared import prompt_logprobs
from shared.pb.common.v1 import model_pb2
from shared.pb.scheduler.v1 import scheduler_pb2 as pb


def build(sequences: Seq[Sequence], first_id: int, layout: model_pb2.BlockLayout, now: float) -> pb.Submission:
    """`sequences`: consecutive samples of one work that have no tokens yet, or a single one with or without."""
    first = sequences[0]
    work = first.work
    output = first.tokens.tobytes()
    submission = pb.Submission(
        first_sequence_id=first_id,
        num_sequences=len(sequences),
        request_id=work.request_id,
        token_ids=work.prompt + output,
        num_prompt_tokens=work.num_prompt_tokens,
        root_hash=work.hashes.root,
        block_hashes=_hashes(work.hashes, output, layout),
        sampling=work.sampling,
        eos_token_ids=work.eos_token_ids,
        bad_word_token_ids=work.bad_word_token_ids,
        think_start_token_ids=work.thinking_marks[0],
        think_end_token_ids=work.thinking_marks[1],
        priority=work.priority,
        tenant=work.tenant,
        timeout_ms=_timeout_ms(work.deadline_s, now),
        age_ms=max(0, int((now - work.arrival_s) * 1000)),
    )
    submission.sampling.seed = _seed(work.sampling.seed, first.number)
    _set_prompt_logprobs(submission, first)
    return submission


def _set_prompt_logprobs(submission: pb.Submission, first: Sequence) -> None:
    """The first sample asks for them, and goes on behind those that have come."""
    position = prompt_logprobs.first_position(submission.sampling)
    if position and first.number:
        prompt_logprobs.forget(submission.sampling)
    elif position and first.num_prompt_logprobs:
        position += first.num_prompt_logprobs
        prompt_logprobs.restart(submission.sampling, position, submission.num_prompt_tokens)


def _hashes(hashes: PromptHashes, output: bytes, layout: model_pb2.BlockLayout) -> bytes:
    """Empty while the layout is unknown: the scheduler then computes them."""
    block_size = known_block_size(layout)
    return b"".join(hashes.continued(block_size, output)) if block_size else b""


def _timeout_ms(deadline_s: float | None, now: float) -> int:
    """At least 1: 0 means no deadline."""
    return 0 if deadline_s is None else max(1, int((deadline_s - now) * 1000))


def _seed(seed: int, number: int) -> int:
    """seed + number in 64-bit two's complement, as every service counts on."""
    return (seed + number + 2**63) % 2**64 - 2**63
