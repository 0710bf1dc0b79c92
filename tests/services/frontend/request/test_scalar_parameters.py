"""Every edge and the worker's message are built from the table of scalar sampling parameters."""

from __future__ import annotations

import math

import pytest

from quire.services.frontend.http.fields import ranges, scalar_fields
from quire.services.frontend.http.fields.scalar_fields import ScalarFields
from quire.services.frontend.input_processor.sampling import sampling_rules
from quire.services.frontend.input_processor.sampling.sampling_message import to_message
from quire.services.frontend.request.request import BeamSearch, Sampling
from quire.services.frontend.request.scalar_parameters import (
    MAX_TOP_K,
    NAMES,
    SCALAR_PARAMETERS,
    ScalarParameter,
    normalized,
)
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import InvalidArgument
from quire.shared.pb.common.v1 import sampling_pb2

NO_DEFAULTS = GenerationDefaults()
WRONG = {
    "presence_penalty": (-2.1, 2.1, math.nan),
    "frequency_penalty": (-2.1, 2.1, math.nan),
    "top_n_sigma": (-0.1, math.inf, math.nan),
    "repetition_penalty": (0.0, -1.0, 5e-324, math.inf, math.nan),
    "top_p": (0.0, 1.1, -0.5, math.nan),
    "top_k": (-2,),
    "min_p": (-0.1, 1.1, math.nan),
}
RIGHT = {
    "presence_penalty": 2,
    "frequency_penalty": -2,
    "top_n_sigma": 1.5,
    "repetition_penalty": 1.3,
    "top_p": 0.9,
    "top_k": 5,
    "min_p": 1,
}


@pytest.mark.parametrize("parameter", SCALAR_PARAMETERS, ids=lambda one: one.name)
def test_a_parameter_is_known_everywhere_by_its_name(parameter: ScalarParameter) -> None:
    assert parameter.name in sampling_pb2.SamplingParams.DESCRIPTOR.fields_by_name
    assert parameter.name in ScalarFields.model_fields
    assert ranges.FIELDS[parameter.name] == parameter.schema
    body = ScalarFields(**{parameter.name: RIGHT[parameter.name]})
    sampling = sampling_rules.build(scalar_fields.given(body), NO_DEFAULTS)
    sampling_rules.check(sampling)
    sent = getattr(to_message(sampling_rules.normalize(sampling), 8), parameter.name)
    assert sent == pytest.approx(RIGHT[parameter.name])


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_a_value_out_of_its_range_is_refused_by_name(name: str, value: float) -> None:
    with pytest.raises(InvalidArgument, match=f"^{name} must be .*got {value}") as refusal:
        sampling_rules.check(sampling_rules.build({name: value}, NO_DEFAULTS))
    assert refusal.value.field == name


def test_nothing_that_was_not_given_is_sent_but_what_always_is() -> None:
    message = to_message(Sampling(), 8)
    sent = {descriptor.name for descriptor, _ in message.ListFields()}
    assert sent & NAMES == {"repetition_penalty", "top_p", "top_k", "min_p"}
    assert {name: getattr(message, name) for name in NAMES} == {one.name: one.default for one in SCALAR_PARAMETERS}


def test_a_greedy_choice_needs_no_filters() -> None:
    given = {"top_p": 0.5, "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.2, "presence_penalty": 1.0}
    greedy = sampling_rules.normalize(sampling_rules.build({**given, "temperature": 0}, NO_DEFAULTS))
    assert greedy.scalars == {"repetition_penalty": 1.2, "presence_penalty": 1.0}
    assert (greedy.value("top_p"), greedy.value("top_k"), greedy.value("min_p")) == (1.0, 0, 0.0)


@pytest.mark.parametrize(("asked", "sent"), [(-1, 0), (0, 0), (7, 7), (2 * MAX_TOP_K, MAX_TOP_K)])
def test_top_k_has_one_spelling_for_each_meaning(asked: int, sent: int) -> None:
    assert normalized({"top_k": asked}, is_greedy=False) == {"top_k": sent}


def test_what_a_model_recommends_for_sampling_is_not_asked_of_a_beam_search() -> None:
    defaults = GenerationDefaults({"repetition_penalty": 1.1, "top_k": 20})
    beams = sampling_rules.build({"beam_search": BeamSearch(2)}, defaults)
    assert beams.scalars == {"top_k": 20}
    for name in sorted(NAMES - {"top_p", "top_k", "min_p"}):
        refused = sampling_rules.build({"beam_search": BeamSearch(2), name: RIGHT[name]}, defaults)
        with pytest.raises(InvalidArgument, match=f"{name} is not supported together with beam search"):
            sampling_rules.check(refused)
