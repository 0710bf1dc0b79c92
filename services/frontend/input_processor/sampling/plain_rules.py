"""Rules of single-number parameters, generated from their table (request/scalar_parameters.py)."""

from __future__ import annotations

from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request.request import Sampling
from quire.services.frontend.request.scalar_parameters import SCALAR_PARAMETERS, NumberBound, ScalarParameter


def _rule(parameter: ScalarParameter, bound: NumberBound) -> Rule:
    """Returns the rule that one numeric parameter lies within one bound, with its error text."""

    def holds(sampling: Sampling) -> bool:
        return bound.holds(sampling.value(parameter.name))

    return Rule(parameter.name, holds, f"{parameter.name} {bound.requirement}, got {{s.scalars[{parameter.name}]}}.")


def _beam_rule(parameter: ScalarParameter) -> Rule:
    """Returns the rule that one numeric parameter has its default value whenever beam search is requested."""

    def holds(sampling: Sampling) -> bool:
        return sampling.beam_search is None or sampling.value(parameter.name) == parameter.default

    return Rule(parameter.name, holds, f"{parameter.name} is not supported together with beam search.")


PLAIN_RULES = (
    *(_rule(parameter, bound) for parameter in SCALAR_PARAMETERS for bound in parameter.bounds),
    *(_beam_rule(parameter) for parameter in SCALAR_PARAMETERS if not parameter.allowed_with_beams),
)
