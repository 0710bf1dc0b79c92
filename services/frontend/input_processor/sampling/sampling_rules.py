"""Rules of the sampling fields and their error texts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import chain
from typing import Any

from quire.services.frontend.input_processor.sampling import beam_rules
from quire.services.frontend.input_processor.sampling.rule import Rule
from quire.services.frontend.request import scalar_parameters
from quire.services.frontend.request.request import RepetitionDetection, Sampling
from quire.services.frontend.request.scalar_parameters import SCALAR_PARAMETERS, NumberBound, ScalarParameter
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared import strict_json
from quire.shared.errors import InvalidArgument
from quire.shared.sampling_params import is_greedy

LOWEST_TEMPERATURE = 0.01  # between greedy and this, logits overflow half precision when divided
MAX_SAMPLES = 16384
MAX_BAD_WORDS = 128
MAX_LOGPROB_TOKEN_IDS = 128
MAX_LOGIT_BIAS = 100.0
WHOLE_VOCABULARY = -1
UNBOUNDED = -1  # for thinking_token_budget
SEED_BOUND = 2**63
MAX_BUDGET = 2**31 - 1  # more than any context
MAX_REPETITION = 2**31 - 1  # in tokens; more than any context
PROCESSORS = "logits_processors"
MAX_ARGUMENTS = 65536  # of names and arguments together


def _detection(sampling: Sampling) -> RepetitionDetection:
    assert sampling.repetition_detection is not None, "the rules apply to detection alone"
    return sampling.repetition_detection


def _detection_rule(holds: Callable[[Sampling], bool], text: str) -> Rule:
    """Returns a rule of repetition detection, for requests that ask for it."""
    return Rule("repetition_detection", holds, f"repetition_detection: {text}", "repetition_detection")


def _rule(parameter: ScalarParameter, bound: NumberBound) -> Rule:
    """Returns the rule that one numeric parameter lies within one bound, with its error text."""

    def holds(sampling: Sampling) -> bool:
        return bound.holds(sampling.value(parameter.name))

    text = f"{parameter.name} {bound.requirement}, got {{s.scalars[{parameter.name}]}}."
    return Rule(parameter.name, holds, text, "scalars")


def _beam_rule(parameter: ScalarParameter) -> Rule:
    """Returns the rule that one numeric parameter has its default value whenever beam search is requested."""

    def holds(sampling: Sampling) -> bool:
        return sampling.beam_search is None or sampling.value(parameter.name) == parameter.default

    return Rule(parameter.name, holds, f"{parameter.name} is not supported together with beam search.", "scalars")


PLAIN_RULES = (
    *(_rule(parameter, bound) for parameter in SCALAR_PARAMETERS for bound in parameter.bounds),
    *(_beam_rule(parameter) for parameter in SCALAR_PARAMETERS if not parameter.allowed_with_beams),
)

RULES = (
    Rule("n", lambda s: s.n >= 1, "n must be at least 1, got {s.n}."),
    Rule("n", lambda s: s.n <= MAX_SAMPLES, f"n must be at most {MAX_SAMPLES}, got {{s.n}}."),
    *PLAIN_RULES,
    Rule("temperature", lambda s: s.temperature >= 0, "temperature must be non-negative, got {s.temperature}."),
    Rule("temperature", lambda s: s.temperature <= 2, "temperature must be in [0, 2], got {s.temperature}."),
    Rule(
        "seed",
        lambda s: s.seed is None or -SEED_BOUND <= s.seed < SEED_BOUND,
        "seed must be in [-2^63, 2^63 - 1], got {s.seed}.",
    ),
    Rule(
        "max_tokens",
        lambda s: s.max_tokens is None or s.max_tokens >= 1,
        "max_tokens must be at least 1, got {s.max_tokens}.",
    ),
    Rule(
        "min_tokens",
        lambda s: s.min_tokens >= 0,
        "min_tokens must be greater than or equal to 0, got {s.min_tokens}.",
    ),
    Rule(
        "min_tokens",
        lambda s: s.max_tokens is None or s.min_tokens <= s.max_tokens,
        "min_tokens must be less than or equal to max_tokens={s.max_tokens}, got {s.min_tokens}.",
    ),
    Rule("stop", lambda s: all(s.stop), "stop cannot contain an empty string."),
    Rule(
        "stop",
        lambda s: s.detokenize or not s.stop,
        "stop strings are only supported when detokenize is True. Set detokenize=True to use stop.",
    ),
    Rule("bad_words", lambda s: all(s.bad_words), "bad_words cannot contain an empty string."),
    Rule(
        "bad_words",
        lambda s: len(s.bad_words) <= MAX_BAD_WORDS,
        f"bad_words must have at most {MAX_BAD_WORDS} entries.",
    ),
    Rule(
        "logprobs",
        lambda s: s.logprobs is None or s.logprobs >= WHOLE_VOCABULARY,
        "logprobs must be non-negative or -1, got {s.logprobs}.",
    ),
    Rule(
        "prompt_logprobs",
        lambda s: s.prompt_logprobs is None or s.prompt_logprobs >= WHOLE_VOCABULARY,
        "prompt_logprobs must be non-negative or -1, got {s.prompt_logprobs}.",
    ),
    Rule(
        "prompt_logprob_start",
        lambda s: s.prompt_logprob_start >= 0,
        "prompt_logprob_start must be non-negative, got {s.prompt_logprob_start}.",
    ),
    Rule(
        "prompt_logprob_start",
        lambda s: s.prompt_logprob_start == 0 or s.prompt_logprobs is not None or bool(s.prompt_logprob_token_ids),
        "prompt_logprob_start needs prompt_logprobs or prompt_logprob_token_ids.",
    ),
    Rule(
        "prompt_logprob_token_ids",
        lambda s: max(map(len, s.prompt_logprob_token_ids), default=0) <= MAX_LOGPROB_TOKEN_IDS,
        f"prompt_logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} entries for a position.",
    ),
    Rule(
        "logprob_token_ids",
        lambda s: len(s.logprob_token_ids) <= MAX_LOGPROB_TOKEN_IDS,
        f"logprob_token_ids must have at most {MAX_LOGPROB_TOKEN_IDS} entries.",
    ),
    Rule(
        "thinking_token_budget",
        lambda s: s.thinking_token_budget is None or UNBOUNDED <= s.thinking_token_budget <= MAX_BUDGET,
        "thinking_token_budget must be -1, or at least 0 and at most 2^31 - 1, got {s.thinking_token_budget}.",
    ),
    Rule(
        "logit_bias",
        lambda s: not any(math.isnan(bias) for bias in s.logit_bias.values()),
        "logit_bias must hold numbers, got {s.logit_bias}.",
    ),
    Rule(
        "allowed_token_ids",
        lambda s: s.allowed_token_ids is None or len(s.allowed_token_ids) > 0,
        "allowed_token_ids is not None and empty!",
    ),
    _detection_rule(
        lambda s: _detection(s).min_pattern_size >= 1,
        "min_pattern_size must be at least 1, got {s.repetition_detection.min_pattern_size}.",
    ),
    _detection_rule(
        lambda s: _detection(s).max_pattern_size >= _detection(s).min_pattern_size,
        "max_pattern_size must be at least min_pattern_size="
        "{s.repetition_detection.min_pattern_size}, got {s.repetition_detection.max_pattern_size}.",
    ),
    _detection_rule(
        lambda s: _detection(s).min_count >= 2,
        "min_count must be at least 2, got {s.repetition_detection.min_count}.",
    ),
    _detection_rule(
        lambda s: _detection(s).max_pattern_size * _detection(s).min_count <= MAX_REPETITION,
        f"max_pattern_size * min_count must be at most {MAX_REPETITION}.",
    ),
    Rule(
        "structured_output",
        lambda s: s.structured_output is None or s.detokenize,
        "structured_output constrains text: detokenize must be true.",
    ),
    *beam_rules.RULES,
    Rule(
        "n",
        lambda s: s.n == 1 or s.beam_search is not None or not is_greedy(s.temperature),
        "n must be 1 when using greedy sampling, got {s.n}.",
    ),
)


def build(given: Mapping[str, Any], defaults: GenerationDefaults) -> Sampling:
    """Merges the request's values over the model's recommendations over the defaults; None counts as not given."""
    values: dict[str, Any] = dict(defaults.sampling)
    if given.get("beam_search") is not None:
        for name in scalar_parameters.NOT_WITH_BEAMS:  # the recommendations are for sampling
            values.pop(name, None)
    values |= {name: value for name, value in given.items() if value is not None}
    scalars = {name: values.pop(name) for name in scalar_parameters.NAMES & values.keys()}
    return Sampling(**values, scalars=scalars)


def check(sampling: Sampling) -> None:
    """Checks the rules that need no model, those of parts only where the request has the part; raises InvalidArgument
    for the first field that breaks one."""
    for rule in RULES:
        if rule.part and not getattr(sampling, rule.part):
            continue
        if not rule.holds(sampling):
            raise InvalidArgument(rule.text.format(s=sampling), field=rule.field)


def check_model(sampling: Sampling, vocab_size: int, max_logprobs: int) -> None:
    """Raises InvalidArgument for token ids outside of the vocabulary and for more logprobs than the workers'
    `max_logprobs`."""
    for field, ids in (
        ("stop_token_ids", sampling.stop_token_ids),
        ("allowed_token_ids", sampling.allowed_token_ids or ()),
        ("logit_bias", sampling.logit_bias),
        ("logprob_token_ids", sampling.logprob_token_ids),
        ("prompt_logprob_token_ids", [*chain(*sampling.prompt_logprob_token_ids)]),
    ):
        wrong = [i for i in ids if not 0 <= i < vocab_size]
        if wrong:
            raise InvalidArgument(f"{field} contains out-of-vocab token ids: {wrong[:8]}.", field=field)
    if sampling.beam_search is not None:
        beam_rules.check_logprobs(sampling)
    for kind, field, wanted in (
        ("sample", "logprobs", sampling.logprobs),
        ("prompt", "prompt_logprobs", sampling.prompt_logprobs),
    ):
        num_logprobs = vocab_size if wanted == WHOLE_VOCABULARY else wanted or 0
        if num_logprobs > max_logprobs:
            message = f"Requested {kind} logprobs of {num_logprobs}, which is greater than max allowed: {max_logprobs}"
            raise InvalidArgument(message, field=field)


def normalize(sampling: Sampling) -> Sampling:
    """Normalizes equivalent values: greedy without filters, 0 for no top_k, no seed for -1, biases within bounds."""
    if is_greedy(sampling.temperature):
        sampling = replace(sampling, temperature=0.0)
    elif sampling.temperature < LOWEST_TEMPERATURE:
        sampling = replace(sampling, temperature=LOWEST_TEMPERATURE)
    budget, scalars = sampling.thinking_token_budget, sampling.scalars
    if scalars:
        scalars = scalar_parameters.normalized(scalars, is_greedy=sampling.temperature == 0)
    normalized: dict[str, Any] = {
        "scalars": scalars,
        "seed": None if sampling.seed == -1 else sampling.seed,
        "thinking_token_budget": None if budget == UNBOUNDED else budget,
        "stop_token_ids": tuple(dict.fromkeys(sampling.stop_token_ids)),
        "logit_bias": {i: min(max(b, -MAX_LOGIT_BIAS), MAX_LOGIT_BIAS) for i, b in sampling.logit_bias.items()},
    }
    changed = {name: value for name, value in normalized.items() if value != getattr(sampling, name)}
    return replace(sampling, **changed) if changed else sampling  # a copy costs as much as all rules


def check_logits_processors(sampling: Sampling) -> None:
    """Raises InvalidArgument if names and arguments exceed MAX_ARGUMENTS together, or any arguments are not a JSON
    object."""
    arguments_by_name = sampling.logits_processors
    count = sum(len(name) + len(arguments) for name, arguments in arguments_by_name.items())
    if count > MAX_ARGUMENTS:
        text = f"{PROCESSORS}: names and arguments have {count} characters; at most {MAX_ARGUMENTS} are accepted."
        raise InvalidArgument(text, field=PROCESSORS)
    for name, arguments in arguments_by_name.items():
        try:
            is_object = isinstance(strict_json.read(arguments or "{}"), dict)
        except ValueError as error:
            raise InvalidArgument(
                f"{PROCESSORS}: arguments of {name!r} are not JSON: {error}", field=PROCESSORS
            ) from None
        if not is_object:
            raise InvalidArgument(f"{PROCESSORS}: arguments of {name!r} must be a JSON object.", field=PROCESSORS)


def check_known_processors(sampling: Sampling, known: frozenset[str]) -> None:
    """Raises InvalidArgument, with the names that exist, for a logits processor that not all workers have."""
    unknown = sorted(sampling.logits_processors.keys() - known)
    if unknown:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidArgument(f"{PROCESSORS}: {unknown[0]!r} does not exist; available: {names}.", field=PROCESSORS)
