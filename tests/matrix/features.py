"""Features of requests: how each is requested, and how an answer shows its effect."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire import BeamSearch, RepetitionDetection, SamplingParams, StructuredOutput
from tests.matrix import checks
from tests.matrix.checks import Check

BASE: Mapping[str, Any] = {"temperature": 0.8, "seed": 13, "max_tokens": 40}


@dataclass(frozen=True)
class Feature:
    """`asks`: fields of SamplingParams; `observes`: it must not change the tokens; `moves`: it must change them."""

    asks: Mapping[str, Any]
    check: Check = checks.nothing
    observes: bool = False
    moves: bool = False
    not_with: Mapping[str, str] = field(default_factory=dict)  # feature -> the field that the refusal names


def _form(check: Check, **constraint: Any) -> Feature:
    return Feature({"structured_output": StructuredOutput(**constraint)}, check)


FORMS = ("json_schema", "regex", "choice", "structural_tag")

REQUESTS: dict[str, Feature] = {
    "greedy": Feature({"temperature": 0.0, "seed": None}, not_with={"n": "n"}),
    "filters": Feature({"top_p": 0.95, "top_k": checks.TOP_K, "min_p": 0.02}, checks.is_likely),
    "penalties": Feature(
        {"presence_penalty": 1.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5, "top_n_sigma": 3.0}, moves=True
    ),
    "bans": Feature({"bad_words": checks.BANNED}, checks.holds_no_bad_word),
    "min_tokens": Feature({"min_tokens": checks.LEAST}, checks.is_long),
    "ignore_eos": Feature({"ignore_eos": True}, checks.does_not_end),
    "bias": Feature({"logit_bias": {checks.COMMA: 2.0, checks.PERIOD: -100.0}}, checks.has_no_period),
    "allowed": Feature({"allowed_token_ids": checks.ALLOWED}, checks.keeps_to_its_tokens),
    "stops": Feature({"stop": [checks.STOP], "stop_token_ids": [checks.PERIOD]}, checks.stops_in_time),
    "repetition": Feature(
        {"repetition_detection": RepetitionDetection(checks.LONGEST_PATTERN, 2)}, checks.does_not_repeat
    ),
    "thinking": Feature({"thinking_token_budget": checks.BUDGET}, checks.thinks_briefly),
    "json_schema": _form(checks.fits_the_schema, json=checks.SCHEMA),
    "regex": _form(checks.matches, regex=checks.PATTERN),
    "choice": _form(checks.is_a_choice, choice=checks.CHOICES),
    "structural_tag": _form(checks.fits_behind_reasoning, structural_tag=checks.TAG),
    "logprobs": Feature({"logprobs": 2}, checks.has_logprobs, observes=True),
    "named_logprobs": Feature({"logprob_token_ids": checks.NAMED}, checks.has_named, observes=True),
    "prompt_logprobs": Feature({"prompt_logprobs": 1}, checks.has_prompt, observes=True),
    "named_prompt_logprobs": Feature(
        {"prompt_logprob_token_ids": [checks.NAMED] * checks.TOLD, "prompt_logprob_start": checks.START},
        checks.has_end_of_prompt,
        observes=True,
    ),
    "flat_logprobs": Feature({"flat_logprobs": True, "logprobs": 2}, checks.is_flat, observes=True),
    "detokenize": Feature(
        {"detokenize": False},
        checks.has_no_text,
        observes=True,
        not_with={"stops": "stop", **dict.fromkeys(FORMS, "structured_output")},
    ),
    "special_tokens": Feature({"skip_special_tokens": False}, observes=True),
    "cold": Feature({"skip_reading_prefix_cache": True}, checks.found_nothing_cached, observes=True),
    "n": Feature({"n": 3}, checks.is_one_of_three, observes=True),
    "beams": Feature(
        {"beam_search": BeamSearch(4)},
        checks.is_best_first,
        not_with={
            "penalties": "presence_penalty",
            "bans": "bad_words",
            "stops": "stop",
            "repetition": "repetition_detection",
            "thinking": "thinking_token_budget",
            **dict.fromkeys(FORMS, "structured_output"),
            "prompt_logprobs": "prompt_logprobs",
            "named_prompt_logprobs": "prompt_logprob_token_ids",
            "named_logprobs": "logprob_token_ids",
        },
    ),
}


def params(*names: str) -> SamplingParams:
    """Parameters of a request with all of the features."""
    merged = dict(BASE)
    for name in names:
        merged |= REQUESTS[name].asks
    return SamplingParams(**merged)


def are_ways_of_one(one: str, other: str) -> bool:
    """Returns whether both features set the same field, so that a request can have only one."""
    asks = REQUESTS[one].asks
    return any(asks.get(name, value) != value for name, value in REQUESTS[other].asks.items())


def refused_field(one: str, other: str) -> str | None:
    """Returns the field that the refusal of a pair names; None if the pair is allowed."""
    return REQUESTS[one].not_with.get(other) or REQUESTS[other].not_with.get(one)
