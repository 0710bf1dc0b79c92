"""Sampling parameters that are a number which the worker alone reads: checked here, and taken by every edge.

A new one is a field of sampling.proto, a line here, and a component of the worker's sampler. HTTP bodies, their
document, gRPC and Python's SamplingParams know it by its name in the proto.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request.request import Sampling


@dataclass(frozen=True, slots=True)
class PlainParameter:
    """`default` is the protocol's, and means that nothing is asked for."""

    name: str
    default: float
    holds: Callable[[float], bool]
    must: str
    with_beams: bool = False  # it goes along with a beam search

    def value(self, sampling: Sampling) -> float:
        return sampling.plain.get(self.name, self.default)


PLAIN_PARAMETERS = (
    PlainParameter("presence_penalty", 0.0, lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    PlainParameter("frequency_penalty", 0.0, lambda value: -2 <= value <= 2, "must be in [-2, 2]"),
    PlainParameter("top_n_sigma", 0.0, lambda value: 0 <= value < math.inf, "must be 0 (disable), or positive"),
)
NAMES = frozenset(parameter.name for parameter in PLAIN_PARAMETERS)


def _rule(parameter: PlainParameter) -> Rule:
    def holds(sampling: Sampling) -> bool:
        return parameter.holds(parameter.value(sampling))

    return Rule(parameter.name, holds, f"{parameter.name} {parameter.must}, got {{s.plain[{parameter.name}]}}.")


def _beam_rule(parameter: PlainParameter) -> Rule:
    def holds(sampling: Sampling) -> bool:
        return sampling.beam_search is None or parameter.value(sampling) == parameter.default

    return Rule(parameter.name, holds, f"{parameter.name} is not offered together with beam search.")


RULES = (
    *map(_rule, PLAIN_PARAMETERS),
    *(_beam_rule(parameter) for parameter in PLAIN_PARAMETERS if not parameter.with_beams),
)
