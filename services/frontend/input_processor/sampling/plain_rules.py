"""Rules of the parameters that are one number, made of their table (request/plain_parameters.py)."""

from __future__ import annotations

from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request.plain_parameters import PLAIN_PARAMETERS, NumberBound, PlainParameter
from quire.services.frontend.request.request import Sampling


def _rule(parameter: PlainParameter, bound: NumberBound) -> Rule:
    def holds(sampling: Sampling) -> bool:
        return bound.holds(sampling.value(parameter.name))

    return Rule(parameter.name, holds, f"{parameter.name} {bound.must}, got {{s.plain[{parameter.name}]}}.")


def _beam_rule(parameter: PlainParameter) -> Rule:
    def holds(sampling: Sampling) -> bool:
        return sampling.beam_search is None or sampling.value(parameter.name) == parameter.default

    return Rule(parameter.name, holds, f"{parameter.name} is not offered together with beam search.")


PLAIN_RULES = (
    *(_rule(parameter, bound) for parameter in PLAIN_PARAMETERS for bound in parameter.bounds),
    *(_beam_rule(parameter) for parameter in PLAIN_PARAMETERS if not parameter.with_beams),
)
