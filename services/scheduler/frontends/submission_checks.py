"""Validates submissions within limits: a value that is too large would cost every sequence's time.

There are two kinds of errors: one that cannot be reported by sequence id ends the session; every other ends only the
submission's sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter

from quire.services.scheduler.core.sequences.ending import Failure
from quire.services.scheduler.frontends.media_checks import wrong_media
from quire.shared.columns import i32, u32
from quire.shared.errors import InvalidArgument
from quire.shared.kv import block_hash
from quire.shared.pb.common.v1.sampling_pb2 import BeamSearch
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb

MAX_SEQUENCES = 16384  # maximum sequences of a submission, as clients may request with n
LAST_ID = 2**32 - 1
MAX_TOKENS = 2**28  # total over all sequences of a submission, each of which has its own copy: 1 GiB
MAX_NAME = 1024  # characters
MAX_STOPS = 2**14  # tokens; clients may name 1,024
MAX_AGE_MS = 7 * 86_400_000  # maximum age and timeout of a request
MAX_GRAMMAR = 2**20  # bytes; clients may send 128 KiB
MAX_PARAMS = 2**24  # bytes: a bias for every token of the largest vocabularies
MAX_LENGTH_PENALTY = 32  # the maximum length to this power is still finite
MAX_PATTERN = 2**16  # tokens of a repeated pattern, and its count


def check_ids(submission: pb.Submission, taken: Collection[int]) -> None:
    """Raises InvalidArgument for sequence ids that are out of range or in use. `taken`: ids of the frontend's
    sequences."""
    first, count = submission.first_sequence_id, submission.num_sequences
    if count > MAX_SEQUENCES:
        raise _wrong("num_sequences", f"must be at most {MAX_SEQUENCES}, got {count}")
    if first + count - 1 > LAST_ID:
        raise _wrong("first_sequence_id", f"{first} and {count} sequences are beyond {LAST_ID}")
    for sequence_id in range(first, first + count):
        if sequence_id in taken:
            raise _wrong("first_sequence_id", f"sequence {sequence_id} is in use")


def _wrong(field: str, problem: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {problem}", field=field)


def refusal(submission: pb.Submission, vocab_size: int) -> Failure | None:
    """Returns an INVALID_ARGUMENT failure that names the first wrong field of a submission, or None; a correct
    frontend never sends such a field. `vocab_size`: 0 while it is unknown."""
    problem = _malformed(submission) or _too_much(submission)
    if not problem and submission.HasField("beam_search"):
        problem = _wrong_search(submission.beam_search)
    if not problem and submission.HasField("late_query"):
        problem = _wrong_query(submission, vocab_size)
    if not problem and submission.media:
        problem = wrong_media(submission.media, submission.num_prompt_tokens)
    if not problem and vocab_size and (wrong := _unknown_token(submission.token_ids, vocab_size)) is not None:
        problem = f"token_ids: {wrong} is not in the vocabulary of {vocab_size} tokens"
    return Failure("INVALID_ARGUMENT", problem) if problem else None


def _malformed(submission: pb.Submission) -> str:
    """Returns which fields of a submission contradict each other or have the wrong size; empty if none do."""
    num_tokens, rest = divmod(len(submission.token_ids), block_hash.TOKEN_BYTES)
    num_hashes, rest_of_hash = divmod(len(submission.block_hashes), block_hash.HASH_BYTES)
    problem = ""
    if rest:
        problem = f"token_ids: {len(submission.token_ids)} bytes are no i32 column"
    elif not 1 <= submission.num_prompt_tokens <= num_tokens:
        problem = f"num_prompt_tokens: {submission.num_prompt_tokens} of {num_tokens} tokens"
    elif submission.num_sequences < 1:
        problem = "num_sequences: must be at least 1, got 0"
    elif submission.samples_nothing and (submission.max_tokens or submission.num_sequences > 1):
        problem = "samples_nothing: goes with max_tokens 0 and num_sequences 1"
    elif submission.samples_nothing and (submission.HasField("beam_search") or submission.grammar):
        problem = "samples_nothing: has no output to search for or to constrain"
    elif not submission.samples_nothing and submission.max_tokens < 1:
        problem = f"max_tokens: must be at least 1, got {submission.max_tokens}"
    elif len(submission.root_hash) != block_hash.HASH_BYTES:
        problem = f"root_hash: {len(submission.root_hash)} bytes instead of {block_hash.HASH_BYTES}"
    elif rest_of_hash:
        problem = f"block_hashes: {len(submission.block_hashes)} bytes are no hashes of {block_hash.HASH_BYTES}"
    elif num_hashes > num_tokens:
        problem = f"block_hashes: {num_hashes} hashes for {num_tokens} tokens"
    return problem


def _wrong_query(submission: pb.Submission, vocab_size: int) -> str:
    """Returns what is wrong with the late-interaction query of a submission; empty if nothing is. `vocab_size`: 0
    while it is unknown."""
    query = submission.late_query
    num_tokens, rest = divmod(len(query.token_ids), block_hash.TOKEN_BYTES)
    if not submission.samples_nothing:
        return "late_query: goes with samples_nothing"
    if rest or not num_tokens:
        return f"late_query.token_ids: {len(query.token_ids)} bytes are no i32 column of tokens"
    if num_tokens > MAX_TOKENS:
        return f"late_query.token_ids: {num_tokens} tokens, the limit is {MAX_TOKENS}"
    if len(query.params) > MAX_PARAMS:
        return f"late_query.params: {len(query.params)} bytes, the limit is {MAX_PARAMS}"
    wrong = _unknown_token(query.token_ids, vocab_size) if vocab_size else None
    return f"late_query.token_ids: {wrong} is not in the vocabulary of {vocab_size} tokens" if wrong is not None else ""


SIZES: tuple[tuple[str, int, int, str], ...] = (  # field, limit, bytes per element, unit
    ("stop_token_ids", MAX_STOPS, block_hash.TOKEN_BYTES, ""),
    ("eos_token_ids", MAX_STOPS, block_hash.TOKEN_BYTES, ""),
    ("request_id", MAX_NAME, 1, " characters"),
    ("tenant", MAX_NAME, 1, " characters"),
    ("grammar", MAX_GRAMMAR, 1, " bytes"),
    ("params", MAX_PARAMS, 1, " bytes"),
)
NUMBERS: tuple[tuple[str, int, Callable[[pb.Submission], int]], ...] = tuple(
    (field, most, attrgetter(field)) for field, most in (("age_ms", MAX_AGE_MS), ("timeout_ms", MAX_AGE_MS))
)
REPETITION_FIELDS = ("min_pattern_size", "max_pattern_size", "min_count")


def _wrong_search(search: BeamSearch) -> str:
    """Returns which parameter of a beam search exceeds its limit; empty if none does."""
    if search.width > MAX_SEQUENCES:
        return f"beam_search.width: {search.width}, the limit is {MAX_SEQUENCES}"
    if not -MAX_LENGTH_PENALTY <= search.length_penalty <= MAX_LENGTH_PENALTY:
        return f"beam_search.length_penalty: {search.length_penalty:g}, the limit is {MAX_LENGTH_PENALTY} either way"
    return ""


def _too_much(submission: pb.Submission) -> str:
    """Returns which field of a submission exceeds its limit in items, bytes or value; empty if none does."""
    num_tokens = len(submission.token_ids) // block_hash.TOKEN_BYTES
    if submission.num_sequences * num_tokens > MAX_TOKENS:
        text = f"{submission.num_sequences} sequences of {num_tokens} tokens, the limit is {MAX_TOKENS}"
        return f"token_ids: {text} together"
    for field, most, size, of in SIZES:
        if len(getattr(submission, field)) > most * size:
            return f"{field}: {len(getattr(submission, field)) // size}{of}, the limit is {most}"
    for field, most, value in NUMBERS:
        if value(submission) > most:
            return f"{field}: {value(submission)}, the limit is {most}"
    if submission.HasField("repetition_detection"):
        for field in REPETITION_FIELDS:
            if (number := getattr(submission.repetition_detection, field)) > MAX_PATTERN:
                return f"repetition_detection.{field}: {number}, the limit is {MAX_PATTERN}"
    return ""


def _unknown_token(column: bytes, vocab_size: int) -> int | None:
    """Returns the first token id that is not in the vocabulary, or None."""
    tokens = u32(column)  # negative ids are large unsigned numbers
    if int(tokens.max()) < vocab_size:
        return None
    return int(i32(column)[tokens >= vocab_size][0])
