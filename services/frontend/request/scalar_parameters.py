"""Sampling parameters that are a single number and are interpreted only by the worker: validated by the frontend,
accepted by every edge.

A new one is a field of sampling.proto, an entry in this table, and a component of the worker's sampler. HTTP bodies,
the OpenAPI document, gRPC, generation_config.json and Python's SamplingParams refer to it by its proto name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

MAX_REPETITION_PENALTY = 1e30  # beyond, logits divided or multiplied by it are infinite in single precision
MAX_TOP_K = 2**31 - 1  # largest value of the wire type; above any vocabulary size


@dataclass(frozen=True, slots=True)
class NumberBound:
    """A condition on a value, and the text that follows the parameter's name in the error."""

    holds: Callable[[float], bool]
    requirement: str


@dataclass(frozen=True, slots=True)
class ScalarParameter:
    """One parameter. `default` is the protocol's value and disables it."""

    name: str
    default: float
    bounds: tuple[NumberBound, ...]
    schema: Mapping[str, Any]  # JSON Schema of the bounds, for the OpenAPI document
    is_integer: bool = False
    is_penalty: bool = False  # penalizes tokens that occurred before
    is_filter: bool = False  # restricts the sampled tokens: ignored by greedy decoding
    allowed_with_beams: bool = False  # can be combined with a beam search
    is_recommended: bool = False  # generation_config.json may recommend a value
    is_always_sent: bool = False  # sent to the worker even at its default
    normalized: Callable[[float], float] | None = None  # maps equivalent values to one


def _normalized_top_k(value: float) -> float:
    """Maps -1 to 0, and values above the wire type's range to its maximum; both mean all tokens."""
    return min(max(value, 0), MAX_TOP_K)


SCALAR_PARAMETERS = (
    ScalarParameter(
        "presence_penalty",
        0.0,
        (NumberBound(lambda value: -2 <= value <= 2, "must be in [-2, 2]"),),
        {"minimum": -2, "maximum": 2},
        is_penalty=True,
    ),
    ScalarParameter(
        "frequency_penalty",
        0.0,
        (NumberBound(lambda value: -2 <= value <= 2, "must be in [-2, 2]"),),
        {"minimum": -2, "maximum": 2},
        is_penalty=True,
    ),
    ScalarParameter(
        "top_n_sigma",
        0.0,
        (NumberBound(lambda value: 0 <= value < math.inf, "must be 0 (disable), or positive"),),
        {"minimum": 0},
    ),
    ScalarParameter(
        "repetition_penalty",
        1.0,
        (
            NumberBound(lambda value: math.isfinite(value) and value > 0, "must be greater than zero"),
            NumberBound(
                lambda value: 1 / MAX_REPETITION_PENALTY <= value <= MAX_REPETITION_PENALTY,
                f"must be in [{1 / MAX_REPETITION_PENALTY:g}, {MAX_REPETITION_PENALTY:g}]",
            ),
        ),
        {"minimum": 1 / MAX_REPETITION_PENALTY, "maximum": MAX_REPETITION_PENALTY},
        is_penalty=True,
        is_recommended=True,
        is_always_sent=True,
    ),
    ScalarParameter(
        "top_p",
        1.0,
        (NumberBound(lambda value: 0 < value <= 1, "must be in (0, 1]"),),
        {"exclusiveMinimum": 0, "maximum": 1},
        is_filter=True,
        allowed_with_beams=True,
        is_recommended=True,
        is_always_sent=True,
    ),
    ScalarParameter(
        "top_k",
        0,
        (NumberBound(lambda value: value >= -1, "must be 0 (disable), or at least 1"),),
        {"minimum": -1},
        is_integer=True,
        is_filter=True,
        allowed_with_beams=True,
        is_recommended=True,
        is_always_sent=True,
        normalized=_normalized_top_k,
    ),
    ScalarParameter(
        "min_p",
        0.0,
        (NumberBound(lambda value: 0 <= value <= 1, "must be in [0, 1]"),),
        {"minimum": 0, "maximum": 1},
        is_filter=True,
        allowed_with_beams=True,
        is_recommended=True,
        is_always_sent=True,
    ),
)
BY_NAME = {parameter.name: parameter for parameter in SCALAR_PARAMETERS}
NAMES = frozenset(BY_NAME)
PROBABILITY_FILTERS = tuple(
    parameter.name for parameter in SCALAR_PARAMETERS if parameter.is_filter and not parameter.is_integer
)
ALWAYS_SENT = tuple(parameter.name for parameter in SCALAR_PARAMETERS if parameter.is_always_sent)
RECOMMENDED = tuple(parameter.name for parameter in SCALAR_PARAMETERS if parameter.is_recommended)
NOT_WITH_BEAMS = frozenset(parameter.name for parameter in SCALAR_PARAMETERS if not parameter.allowed_with_beams)


def normalized(given: Mapping[str, float], *, is_greedy: bool) -> dict[str, float]:
    """Returns the parameters that take effect, with equivalent values mapped to one; greedy decoding drops those that
    only restrict the sampled tokens."""
    kept = {name: value for name, value in given.items() if not (is_greedy and BY_NAME[name].is_filter)}
    for name, value in kept.items():
        normalize = BY_NAME[name].normalized
        if normalize is not None:
            kept[name] = normalize(value)
    return kept
