"""What frontends submit, turned into sequences."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

from services.scheduler.core.beam_search import BeamRules, BeamSearch
from services.scheduler.core.repetition import RepetitionRule
from services.scheduler.core.sequence import Failure, Family, Sequence
from shared import block_hash, prompt_logprobs
from shared.columns import i32, u32
from shared.pb.common.v1 import sampling_pb2
from shared.pb.scheduler.v1 import scheduler_pb2 as pb

MAX_SEQUENCES = 16384  # of a submission: what a client may ask for, as n


@dataclass(frozen=True, slots=True)
class Payload:
    """What only the worker looks at."""

    sampling: sampling_pb2.SamplingParams
    eos_token_ids: bytes
    bad_word_token_ids: tuple[bytes, ...]
    think_start_token_ids: bytes = b""
    think_end_token_ids: bytes = b""


class SequenceFactory:
    """Gives every sequence a key of its own."""

    def __init__(self) -> None:
        self._keys = itertools.count(1)

    def sequences(self, submission: pb.Submission, owner: int, now: float) -> Iterator[Sequence]:
        """Sequence i samples with seed + i; of a beam search there is only the root. The chain of block hashes may be
        missing: see complete()."""
        samples = self._samples(submission, owner, now)
        if submission.sampling.HasField("beam_search"):
            yield _root(list(samples), submission)
        else:
            yield from samples

    def _samples(self, submission: pb.Submission, owner: int, now: float) -> Iterator[Sequence]:
        hashes = block_hash.split(submission.block_hashes)
        grammar_id = _grammar_id(submission.sampling)
        eos = tuple(u32(submission.eos_token_ids).tolist())
        arrival = now - submission.age_ms / 1000
        deadline = now + submission.timeout_ms / 1000 if submission.timeout_ms else math.inf
        family = Family() if submission.num_sequences > 1 else None
        for i in range(submission.num_sequences):
            payload = _payload(submission, i)
            yield Sequence(
                key=next(self._keys),
                owner=owner,
                stream=submission.first_sequence_id + i,
                tokens=bytearray(submission.token_ids),
                num_prompt_tokens=submission.num_prompt_tokens,
                max_total_tokens=submission.num_prompt_tokens + submission.sampling.max_tokens,
                stop_token_ids=tuple(submission.sampling.stop_token_ids),
                eos_token_ids=eos,
                root_hash=submission.root_hash,
                block_hashes=list(hashes),
                skip_reading_prefix_cache=submission.sampling.skip_reading_prefix_cache,
                asks_logprobs=submission.sampling.HasField("logprobs") or bool(submission.sampling.logprob_token_ids),
                prompt_logprobs_from=prompt_logprobs.first_position(payload.sampling),
                repetition=_repetition(submission.sampling),
                min_output_tokens=submission.sampling.min_tokens,
                grammar_id=grammar_id,
                grammar_bytes=submission.sampling.structured_output.ByteSize(),
                family=family,
                payload=payload,
                request_id=submission.request_id,
                priority=submission.priority,
                tenant=submission.tenant,
                arrival=arrival,
                deadline=deadline,
            )


def _root(outputs: list[Sequence], submission: pb.Submission) -> Sequence:
    """The first of `outputs`, which stands for all of them while the search goes on."""
    root, sampling = outputs[0], sampling_pb2.SamplingParams()
    sampling.CopyFrom(submission.sampling)
    asked = sampling.beam_search
    rules = BeamRules(
        width=max(asked.width, len(outputs)),
        num_outputs=len(outputs),
        max_output_tokens=sampling.max_tokens,
        end_token_ids=frozenset((*root.eos_token_ids, *root.stop_token_ids)),
        length_penalty=asked.length_penalty if asked.HasField("length_penalty") else 1.0,
        early_stopping=asked.early_stopping,
    )
    root.num_logprobs = sampling.logprobs if sampling.HasField("logprobs") else None
    sampling.logprobs = rules.num_candidates  # what the worker tells of a beam
    root.payload = Payload(sampling, submission.eos_token_ids, ())
    root.search, root.outputs, root.family = BeamSearch(rules), outputs, None
    return root


def _repetition(sampling: sampling_pb2.SamplingParams) -> RepetitionRule | None:
    if not sampling.HasField("repetition_detection"):
        return None
    rule = sampling.repetition_detection
    return RepetitionRule(rule.min_pattern_size, rule.max_pattern_size, rule.min_count)


def _grammar_id(sampling: sampling_pb2.SamplingParams) -> bytes:
    """Equal constraints have equal names, whoever asks for them."""
    if not sampling.HasField("structured_output"):
        return b""
    return hashlib.sha256(sampling.structured_output.SerializeToString(deterministic=True)).digest()


def _payload(submission: pb.Submission, index: int) -> Payload:
    sampling = submission.sampling
    if index:
        sampling = sampling_pb2.SamplingParams()
        sampling.CopyFrom(submission.sampling)
        prompt_logprobs.forget(sampling)
        sampling.seed = (sampling.seed + index + 2**63) % 2**64 - 2**63  # wraps as int64
    return Payload(
        sampling,
        submission.eos_token_ids,
        tuple(submission.bad_word_token_ids),
        submission.think_start_token_ids,
        submission.think_end_token_ids,
    )


def refusal(submission: pb.Submission, vocab_size: int) -> Failure | None:
    """What is wrong with a submission that a correct frontend never sends; `vocab_size`: 0 while nobody knows it."""
    num_tokens, rest = divmod(len(submission.token_ids), block_hash.TOKEN_BYTES)
    problem = ""
    if rest:
        problem = f"token_ids: {len(submission.token_ids)} bytes are no i32 column"
    elif not 1 <= submission.num_prompt_tokens <= num_tokens:
        problem = f"num_prompt_tokens: {submission.num_prompt_tokens} of {num_tokens} tokens"
    elif submission.num_sequences < 1:
        problem = "num_sequences: must be at least 1, got 0"
    elif submission.sampling.max_tokens < 1:
        problem = f"sampling.max_tokens: must be at least 1, got {submission.sampling.max_tokens}"
    elif len(submission.root_hash) != block_hash.HASH_BYTES:
        problem = f"root_hash: {len(submission.root_hash)} bytes instead of {block_hash.HASH_BYTES}"
    elif submission.num_sequences > MAX_SEQUENCES:
        problem = f"num_sequences: must be at most {MAX_SEQUENCES}, got {submission.num_sequences}"
    elif vocab_size and (wrong := _unknown_token(submission.token_ids, vocab_size)) is not None:
        problem = f"token_ids: {wrong} is not in the vocabulary of {vocab_size} tokens"
    return Failure("INVALID_ARGUMENT", problem) if problem else None


def _unknown_token(column: bytes, vocab_size: int) -> int | None:
    """The first token id that the model does not have."""
    tokens = u32(column)  # negative ones are large
    if int(tokens.max()) < vocab_size:
        return None
    return int(i32(column)[tokens >= vocab_size][0])


def complete(sequence: Sequence, block_size: int) -> None:
    """Hashes the full blocks that the frontend did not hash."""
    missing_from = len(sequence.block_hashes) * block_size
    if sequence.num_tokens // block_size == len(sequence.block_hashes):
        return
    if sequence.num_tokens < missing_from:  # hashed for another block size
        sequence.block_hashes.clear()
        missing_from = 0
    parent = sequence.block_hashes[-1] if sequence.block_hashes else sequence.root_hash
    rest = bytes(sequence.tokens[missing_from * block_hash.TOKEN_BYTES :])
    sequence.block_hashes += block_hash.chain(parent, rest, block_size)
