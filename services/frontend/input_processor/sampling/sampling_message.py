"""Conversion of sampling parameters to the message for schedulers and workers."""

from __future__ import annotations

import random
from collections.abc import Iterable

from quire.services.frontend.request.request import BeamSearch, RepetitionDetection, Sampling
from quire.services.frontend.request.scalar_parameters import ALWAYS_SENT
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.columns import i32_bytes
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.pb.worker.v1 import worker_pb2


def to_message(sampling: Sampling, max_tokens: int) -> sampling_pb2.SamplingParams:
    """Returns the complete message without the fields that only the frontend uses; raises InvalidArgument if
    min_tokens exceeds `max_tokens`. An unseeded prompt gets its seed here, once, so that migrating its sequences
    does not change their output."""
    if sampling.min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens must be less than or equal to max_tokens={max_tokens}, got {sampling.min_tokens}.",
            field="min_tokens",
        )
    message = sampling_pb2.SamplingParams(
        n=1,
        temperature=sampling.temperature,
        seed=random.getrandbits(63) if sampling.seed is None else sampling.seed,
        max_tokens=max_tokens,
        min_tokens=sampling.min_tokens,
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
        logit_bias=sampling.logit_bias,
        allowed_token_ids=sampling.allowed_token_ids or (),
        repetition_detection=_detection(sampling.repetition_detection),
        beam_search=_search(sampling.beam_search),
        logprobs=sampling.logprobs,
        logprob_token_ids=sampling.logprob_token_ids,
        prompt_logprobs=sampling.prompt_logprobs,
        prompt_logprob_start=sampling.prompt_logprob_start or None,
        prompt_logprob_token_ids=[sampling_pb2.NamedTokens(ids=ids) for ids in sampling.prompt_logprob_token_ids],
        thinking_token_budget=sampling.thinking_token_budget,
        skip_reading_prefix_cache=sampling.skip_reading_prefix_cache,
        logits_processors=sampling.logits_processors,
    )
    for name in ALWAYS_SENT:
        setattr(message, name, sampling.value(name))
    for name, value in sampling.scalars.items():
        setattr(message, name, value)
    return message


def grammar_bytes(sampling: Sampling) -> bytes:
    """Serializes a constraint; equal constraints have equal bytes."""
    structured_output = sampling.structured_output
    return b"" if structured_output is None else structured_output.SerializeToString(deterministic=True)


def timestamp_rules(sampling: Sampling) -> worker_pb2.TimestampRules | None:
    """Converts the rules for time stamps to their message; None without rules."""
    rules = sampling.timestamps
    if rules is None:
        return None
    return worker_pb2.TimestampRules(
        first_id=rules.first_id, declining_id=rules.declining_id, max_initial_steps=rules.max_initial_steps
    )


async def bad_word_columns(words: Iterable[str], tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Returns the token columns of each word at the start of a text and after a space."""
    columns: dict[bytes, None] = {}
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    if not spellings:
        return ()
    for ids in await tokenizer.encode_all(spellings):
        if ids:
            columns[i32_bytes(ids)] = None
    return tuple(columns)


def _search(search: BeamSearch | None) -> sampling_pb2.BeamSearch | None:
    """Converts the parameters of beam search to their message; None stays None (no beam search)."""
    if search is None:
        return None
    return sampling_pb2.BeamSearch(
        width=search.width, length_penalty=search.length_penalty, early_stopping=search.early_stopping
    )


def _detection(detection: RepetitionDetection | None) -> sampling_pb2.RepetitionDetection | None:
    """Converts the parameters of repetition detection to their message; None stays None (no detection)."""
    if detection is None:
        return None
    return sampling_pb2.RepetitionDetection(
        min_pattern_size=detection.min_pattern_size,
        max_pattern_size=detection.max_pattern_size,
        min_count=detection.min_count,
    )
