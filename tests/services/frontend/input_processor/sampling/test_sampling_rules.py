"""Tests of every sampling field: refused values and their error messages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from quire.services.frontend.input_processor.processor import InputProcessor
from quire.services.frontend.input_processor.sampling import sampling_rules, unsupported_fields
from quire.services.frontend.request.request import BeamSearch, RepetitionDetection
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.errors import InvalidArgument, Unimplemented
from tests.services.frontend.tiny_folder import write_folder

NO_DEFAULTS = GenerationDefaults()

REFUSED = [
    ({"n": 0}, "n must be at least 1, got 0."),
    ({"n": 16385}, "n must be at most 16384, got 16385."),
    ({"n": 2, "temperature": 0.0}, "n must be 1 when using greedy sampling, got 2."),
    ({"presence_penalty": 2.5}, "presence_penalty must be in [-2, 2], got 2.5."),
    ({"frequency_penalty": -3.0}, "frequency_penalty must be in [-2, 2], got -3.0."),
    ({"repetition_penalty": 0.0}, "repetition_penalty must be greater than zero, got 0.0."),
    ({"repetition_penalty": float("inf")}, "repetition_penalty must be greater than zero, got inf."),
    ({"repetition_penalty": 5e-324}, "repetition_penalty must be in [1e-30, 1e+30], got 5e-324."),
    ({"repetition_penalty": 1e31}, "repetition_penalty must be in [1e-30, 1e+30], got 1e+31."),
    ({"temperature": -0.1}, "temperature must be non-negative, got -0.1."),
    ({"temperature": 2.1}, "temperature must be in [0, 2], got 2.1."),
    ({"temperature": float("nan")}, "temperature must be non-negative, got nan."),
    ({"top_p": 0.0}, "top_p must be in (0, 1], got 0.0."),
    ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5."),
    ({"top_k": -2}, "top_k must be 0 (disable), or at least 1, got -2."),
    ({"min_p": 1.01}, "min_p must be in [0, 1], got 1.01."),
    ({"seed": 2**63}, "seed must be in [-2^63, 2^63 - 1], got 9223372036854775808."),
    ({"max_tokens": 0}, "max_tokens must be at least 1, got 0."),
    ({"min_tokens": -1}, "min_tokens must be greater than or equal to 0, got -1."),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens must be less than or equal to max_tokens=4, got 5."),
    ({"stop": ["a", ""]}, "stop cannot contain an empty string."),
    (
        {"stop": ["a"], "detokenize": False},
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
    ),
    ({"bad_words": [""]}, "bad_words cannot contain an empty string."),
    ({"bad_words": ["x"] * 129}, "bad_words must have at most 128 entries."),
    ({"logprobs": -2}, "logprobs must be non-negative or -1, got -2."),
    ({"beam_search": BeamSearch(0)}, "beam_search: width must be in [1, 128], got 0."),
    ({"beam_search": BeamSearch(129)}, "beam_search: width must be in [1, 128], got 129."),
    ({"beam_search": BeamSearch(3), "n": 4}, "beam_search: n must be at most width=3, got 4."),
    ({"prompt_logprobs": -2}, "prompt_logprobs must be non-negative or -1, got -2."),
    ({"prompt_logprobs": 1, "prompt_logprob_start": -1}, "prompt_logprob_start must be non-negative, got -1."),
    ({"prompt_logprob_start": 1}, "prompt_logprob_start needs prompt_logprobs or prompt_logprob_token_ids."),
    (
        {"prompt_logprob_token_ids": [[1], [1] * 129]},
        "prompt_logprob_token_ids must have at most 128 entries for a position.",
    ),
    ({"logprob_token_ids": [1] * 129}, "logprob_token_ids must have at most 128 entries."),
    (
        {"thinking_token_budget": -2},
        "thinking_token_budget must be -1, or at least 0 and at most 2^31 - 1, got -2.",
    ),
    ({"logit_bias": {1: float("nan")}}, "logit_bias must hold numbers, got {1: nan}."),
    ({"allowed_token_ids": []}, "allowed_token_ids is not None and empty!"),
    (
        {"repetition_detection": RepetitionDetection(3, 2, 0)},
        "repetition_detection: min_pattern_size must be at least 1, got 0.",
    ),
    (
        {"repetition_detection": RepetitionDetection(2, 2, 3)},
        "repetition_detection: max_pattern_size must be at least min_pattern_size=3, got 2.",
    ),
    (
        {"repetition_detection": RepetitionDetection(2, 1)},
        "repetition_detection: min_count must be at least 2, got 1.",
    ),
    (
        {"repetition_detection": RepetitionDetection(2**30, 2)},
        "repetition_detection: max_pattern_size * min_count must be at most 2147483647.",
    ),
]


@pytest.mark.parametrize(("given", "text"), REFUSED)
def test_values_out_of_range_are_refused_naming_field_and_value(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        sampling_rules.check(sampling_rules.build(given, NO_DEFAULTS))
    assert refusal.value.message == text
    assert refusal.value.field in given


@pytest.mark.parametrize(
    "asked",
    [
        {"presence_penalty": 0.5},
        {"frequency_penalty": 0.5},
        {"repetition_penalty": 1.5},
        {"bad_words": ["x"]},
        {"stop": ["x"]},
        {"repetition_detection": RepetitionDetection(1, 2)},
        {"thinking_token_budget": 0},
        {"prompt_logprobs": 0},
        {"prompt_logprob_token_ids": [[1]]},
        {"logprob_token_ids": [1]},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_parameters_that_beam_search_excludes(asked: dict[str, Any]) -> None:
    (field,) = asked
    with pytest.raises(InvalidArgument, match=f"^{field} is not supported together with beam search.$") as refusal:
        sampling_rules.check(sampling_rules.build({**asked, "beam_search": BeamSearch(2)}, NO_DEFAULTS))
    assert refusal.value.field == field


def test_the_models_recommended_sampling_does_not_apply_to_beam_search() -> None:
    defaults = GenerationDefaults({"repetition_penalty": 1.1, "temperature": 0.6})
    built = sampling_rules.build({"beam_search": BeamSearch(2), "n": 2, "stop": [], "temperature": 0.0}, defaults)
    sampling_rules.check(built)
    assert built.value("repetition_penalty") == 1.0


@pytest.mark.parametrize("penalty", [-1e300, -32.5, 33.0, float("inf"), float("nan")])
def test_a_length_penalty_out_of_range_is_refused(penalty: float) -> None:
    with pytest.raises(InvalidArgument, match=r"length_penalty must be in \[-32, 32\], got") as refused:
        sampling_rules.check(sampling_rules.build({"beam_search": BeamSearch(2, penalty)}, NO_DEFAULTS))
    assert refused.value.field == "length_penalty"


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"beam_search": BeamSearch(128), "n": 128},
        {"beam_search": BeamSearch(2, -32.0)},
        {"beam_search": BeamSearch(2, 32.0)},
        {"repetition_penalty": 1e-30},
        {"repetition_penalty": 1e30},
        {"n": 16384},
        {"temperature": 0.0},
        {"temperature": 2.0, "top_p": 1.0, "top_k": -1, "min_p": 1.0},
        {"seed": -(2**63)},
        {"presence_penalty": -2.0, "frequency_penalty": 2.0, "repetition_penalty": 0.001},
        {"min_tokens": 4, "max_tokens": 4},
        {"logprobs": -1},
        {"logprob_token_ids": [1] * 128},
        {"thinking_token_budget": -1},
        {"thinking_token_budget": 0},
        {"repetition_detection": RepetitionDetection(1, 2)},
    ],
)
def test_values_at_the_bounds_are_accepted(given: dict[str, Any]) -> None:
    sampling_rules.check(sampling_rules.build(given, NO_DEFAULTS))


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"stop_token_ids": [3, 100]}, "stop_token_ids contains out-of-vocab token ids: [100]."),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids contains out-of-vocab token ids: [-1]."),
        ({"logit_bias": {200: 1.0}}, "logit_bias contains out-of-vocab token ids: [200]."),
        (
            {"beam_search": BeamSearch(2), "logprobs": 5},
            "logprobs must be in [0, 4] with a beam search of width 2, got 5.",
        ),
        ({"prompt_logprobs": 6}, "Requested prompt logprobs of 6, which is greater than max allowed: 5"),
        (
            {"prompt_logprob_token_ids": [[], [5, 100]]},
            "prompt_logprob_token_ids contains out-of-vocab token ids: [100].",
        ),
        ({"logprob_token_ids": [5, 100]}, "logprob_token_ids contains out-of-vocab token ids: [100]."),
        ({"logprobs": 6}, "Requested sample logprobs of 6, which is greater than max allowed: 5"),
        ({"logprobs": -1}, "Requested sample logprobs of 100, which is greater than max allowed: 5"),
    ],
)
def test_options_that_the_model_or_the_workers_lack_are_refused(given: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        sampling_rules.check_model(sampling_rules.build(given, NO_DEFAULTS), vocab_size=100, max_logprobs=5)
    assert refusal.value.message == text


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"a": "[]"}, "logits_processors: arguments of 'a' must be a JSON object."),
        ({"a": "{"}, "logits_processors: arguments of 'a' are not JSON: "),
        ({"a": '{"b": NaN}'}, "logits_processors: arguments of 'a' are not JSON: NaN is not JSON"),
        ({"a": "[" * 5000}, "logits_processors: arguments of 'a' are not JSON: it is nested too deeply"),
        (
            {"a": " " * 65536},
            "logits_processors: names and arguments have 65537 characters; at most 65536 are accepted.",
        ),
    ],
)
def test_arguments_of_logits_processors_are_json_objects(asked: dict[str, str], text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        sampling_rules.check_logits_processors(sampling_rules.build({"logits_processors": asked}, NO_DEFAULTS))
    assert refusal.value.message.startswith(text)


def test_only_logits_processors_that_all_workers_have_can_be_named() -> None:
    asked = sampling_rules.build({"logits_processors": {"a": "", "c": "{}"}}, NO_DEFAULTS)
    sampling_rules.check_logits_processors(asked)
    sampling_rules.check_known_processors(asked, frozenset({"a", "b", "c"}))
    with pytest.raises(InvalidArgument, match="'c' does not exist; available: a, b"):
        sampling_rules.check_known_processors(asked, frozenset({"a", "b"}))


def test_the_request_overrides_the_model_and_the_model_the_protocol() -> None:
    defaults = GenerationDefaults({"temperature": 0.6, "top_k": 20}, max_new_tokens=99)
    built = sampling_rules.build({"temperature": 0.1, "top_p": None}, defaults)
    assert (built.temperature, built.value("top_k"), built.value("top_p"), built.max_tokens) == (0.1, 20, 1.0, None)


def test_equivalent_values_are_normalized() -> None:
    greedy = sampling_rules.normalize(
        sampling_rules.build({"temperature": 1e-6, "top_p": 0.5, "top_k": 7}, NO_DEFAULTS)
    )
    assert (greedy.temperature, greedy.value("top_p"), greedy.value("top_k")) == (0.0, 1.0, 0)
    cold = sampling_rules.normalize(sampling_rules.build({"temperature": 0.001, "top_k": -1, "seed": -1}, NO_DEFAULTS))
    assert (cold.temperature, cold.value("top_k"), cold.seed) == (0.01, 0, None)
    biased = {"logit_bias": {1: 500.0, 2: -500.0}, "stop_token_ids": [3, 3, 1]}
    bounded = sampling_rules.normalize(sampling_rules.build(biased, NO_DEFAULTS))
    assert dict(bounded.logit_bias) == {1: 100.0, 2: -100.0}
    assert list(bounded.stop_token_ids) == [3, 1]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("functions", [{"name": "f"}]),
    ],
)
def test_unsupported_features_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(Unimplemented) as refusal:
        unsupported_fields.reject_unsupported({name: value})
    assert refusal.value.field == name


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("response_format", {"type": "text"}),
        ("tools", None),
        ("tool_choice", "auto"),
        ("modalities", ["text"]),
        ("suffix", ""),
        ("an unknown name", 1),
    ],
)
def test_no_op_values_are_accepted(name: str, value: Any) -> None:
    assert name not in unsupported_fields.NO_OP_VALUES or value in unsupported_fields.NO_OP_VALUES[name]
    unsupported_fields.reject_unsupported({name: value})


def test_a_model_that_recommends_nonsense_is_a_start_up_error(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_folder(tmp_path, generation_config={"top_p": 7.0}), threads=1)
    with pytest.raises(InvalidArgument, match=r"generation_config.json: top_p must be in \(0, 1\], got 7.0."):
        InputProcessor(tokenizer, vocab_size=1000, max_samples=10)


@pytest.mark.parametrize(
    ("name", "value", "needed"),
    [
        ("temperature", "hot", "a number"),
        ("top_p", [0.9], "a number"),
        ("repetition_penalty", True, "a number"),
        ("top_k", 2.5, "an integer"),
        ("top_k", math.inf, "an integer"),
        ("max_new_tokens", 0, "an integer of at least 1"),
    ],
)
def test_a_recommendation_that_is_no_number_is_named(tmp_path: Path, name: str, value: Any, needed: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        Tokenizer(write_folder(tmp_path, generation_config={name: value}), threads=1)
    found = f"model: generation_config.json: {name} must be {needed}, got {value!r}; correct it or leave it out"
    assert refused.value.message == found


def test_recommendations_are_read_as_transformers_reads_them(tmp_path: Path) -> None:
    """Checks that a top_p of 0 keeps only the most likely token, integers may be floats, and null means unset."""
    sent = {"top_p": 0.0, "top_k": 20.0, "max_new_tokens": 99, "temperature": None}
    tokenizer = Tokenizer(write_folder(tmp_path, generation_config=sent), threads=1)
    InputProcessor(tokenizer, vocab_size=1000, max_samples=10)
    built = sampling_rules.build({}, tokenizer.defaults)
    assert (built.value("top_p"), built.value("top_k"), built.temperature) == (1e-6, 20, 1.0)
    assert sampling_rules.build({"top_p": 0.5}, tokenizer.defaults).value("top_p") == 0.5


def test_a_plain_parameter_is_refused_by_name_and_with_beam_search() -> None:
    for value in (-1.0, math.inf, math.nan):
        with pytest.raises(InvalidArgument, match="top_n_sigma must be 0") as refused:
            sampling_rules.check(sampling_rules.build({"top_n_sigma": value}, GenerationDefaults()))
        assert refused.value.field == "top_n_sigma"
    beams = {"beam_search": BeamSearch(2), "n": 2}
    sampling_rules.check(sampling_rules.build({**beams, "top_n_sigma": 0.0}, GenerationDefaults()))
    with pytest.raises(InvalidArgument, match="top_n_sigma is not supported together with beam search"):
        sampling_rules.check(sampling_rules.build({**beams, "top_n_sigma": 1.0}, GenerationDefaults()))
