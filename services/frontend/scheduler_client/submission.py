"""Work as it is sent: columns, block hashes, what is left of the time."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from services.frontend.scheduler_client.sequence import Sequence
from shared import block_hash
from shared.pb.common.v1 import model_pb2
from shared.pb.scheduler.v1 import scheduler_pb2 as pb


def build(sequences: Seq[Sequence], first_id: int, layout: model_pb2.BlockLayout, now: float) -> pb.Submission:
    """`sequences`: consecutive samples of one work that have no tokens yet, or a single one with or without."""
    first = sequences[0]
    work = first.work
    token_ids = work.prompt + first.tokens.tobytes()
    submission = pb.Submission(
        first_sequence_id=first_id,
        num_sequences=len(sequences),
        request_id=work.request_id,
        token_ids=token_ids,
        num_prompt_tokens=work.num_prompt_tokens,
        root_hash=work.root_hash,
        block_hashes=_hashes(work.root_hash, token_ids, layout),
        sampling=work.sampling,
        eos_token_ids=work.eos_token_ids,
        bad_word_token_ids=work.bad_word_token_ids,
        tenant=work.tenant,
        timeout_ms=_timeout_ms(work.deadline_s, now),
        age_ms=max(0, int((now - work.arrival_s) * 1000)),
    )
    submission.sampling.seed = _seed(work.sampling.seed, first.number)
    return submission


def _hashes(root: bytes, token_ids: bytes, layout: model_pb2.BlockLayout) -> bytes:
    """Empty while the layout is unknown or hashed in another way: the scheduler then computes them."""
    if not layout.block_size or layout.hash_scheme != block_hash.SCHEME:
        return b""
    return b"".join(block_hash.chain(root, token_ids, layout.block_size))


def _timeout_ms(deadline_s: float | None, now: float) -> int:
    """At least 1: 0 means no deadline."""
    return 0 if deadline_s is None else max(1, int((deadline_s - now) * 1000))


def _seed(seed: int, number: int) -> int:
    """seed + number in 64-bit two's complement, as every service counts on."""
    return (seed + number + 2**63) % 2**64 - 2**63
