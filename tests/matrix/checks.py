"""Checks that an answer shows a feature's effect, and the parameter values of its requests."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence

from quire import SamplingParams
from quire.outputs import CompletionOutput, FlatLogprobs, Logprob, RequestOutput

Check = Callable[[CompletionOutput, RequestOutput, SamplingParams], None]

TOP_K = 5
THINK, DONE = 5, 6  # <think>, </think> of quire-tiny
COMMA, PERIOD = 27, 29
BUDGET = 6  # tokens of reasoning
LEAST = 32  # tokens of an answer
START, TOLD = 20, 3  # first prompt position with log-probabilities, and how many have NAMED ones
NAMED = [5, 300, 17, 300]
BANNED = ("wise", "friend")
STOP = "bread"
ALLOWED = list(range(1500))
LONGEST_PATTERN = 4
CHOICES = ("a storm from the sea", "a stone", "nobody")
PATTERN = "[A-Z][a-z]{2,8}( [a-z]{2,6}){2,3}!"
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
TAG = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "any_text"},
            {"type": "const_string", "value": "</think>"},
            {"type": "json_schema", "json_schema": SCHEMA},
        ],
    },
}


def nothing(_sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    """No check: the comparison with other answers suffices."""


def is_likely(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    """Checks that tokens pass the filter; ties with the least likely kept token count."""
    assert asked.min_p is not None
    farthest = -math.log(asked.min_p) * (asked.temperature or 1)
    for entry in sample.logprobs or ():
        assert entry.rank <= TOP_K or entry.logprob > max(entry.top.values()) - farthest - 1e-3


def holds_no_bad_word(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    assert asked.structured_output is not None or not re.search(r"\b(wise|friend)\b", sample.text)


def is_long(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    assert len(sample.token_ids) >= LEAST or asked.structured_output is not None


def does_not_end(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    assert not _is_whole(sample) or asked.structured_output is not None


def has_no_period(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert PERIOD not in sample.token_ids


def keeps_to_its_tokens(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert set(sample.token_ids) <= set(ALLOWED)


def stops_in_time(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    assert sample.finish_reason != "stop" or sample.stop_reason in (STOP, PERIOD, None)
    held = asked.min_tokens or 0
    assert PERIOD not in sample.token_ids[held:-1]
    assert held or STOP not in sample.text


def does_not_repeat(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    tokens = sample.token_ids
    repeated = [length for length in range(max(2, asked.min_tokens or 0), len(tokens) + 1) if _repeats(tokens[:length])]
    assert repeated in ([], [len(tokens)])
    assert repeated or sample.finish_reason != "repetition"


def _repeats(tokens: Sequence[int]) -> bool:
    sizes = range(1, min(LONGEST_PATTERN, len(tokens) // 2) + 1)
    return any(tokens[-size:] == tokens[-2 * size : -size] for size in sizes)


def thinks_briefly(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    form = asked.structured_output
    if form is None or form.structural_tag is not None:
        assert DONE in sample.token_ids[: BUDGET + 1] or len(sample.token_ids) <= BUDGET


def fits_the_schema(sample: CompletionOutput, _result: RequestOutput, asked: SamplingParams) -> None:
    if _is_whole(sample) and asked.detokenize is not False:
        found = json.loads(sample.text)
        assert set(found) == {"name", "age"}
        assert 0 <= found["age"] <= 99
    else:
        assert sample.text[:1] in ("", "{")


def fits_behind_reasoning(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    if _is_whole(sample):
        document = re.search(r"\{[^{}]*\}$", sample.text)
        assert document
        assert set(json.loads(document.group())) == {"name", "age"}
        assert DONE in sample.token_ids


def matches(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    if _is_whole(sample):
        assert re.fullmatch(PATTERN, sample.text)
    else:
        assert re.match("[A-Z]?[a-z]*", sample.text)


def is_a_choice(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert any(choice.startswith(sample.text) for choice in CHOICES)
    assert not _is_whole(sample) or sample.text in CHOICES


def _is_whole(sample: CompletionOutput) -> bool:
    """Returns whether the sample ended with an end-of-sequence token."""
    return sample.finish_reason == "stop" and sample.stop_reason is None


def has_logprobs(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert sample.logprobs is not None
    assert _ids(sample.logprobs) == sample.token_ids
    assert all(entry.rank >= 1 and len(entry.top) >= 2 for entry in sample.logprobs)


def has_named(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert sample.logprobs is not None
    assert all(set(entry.top) == set(NAMED) for entry in sample.logprobs)


def has_prompt(_sample: CompletionOutput, result: RequestOutput, asked: SamplingParams) -> None:
    first = asked.prompt_logprob_start or 1
    assert isinstance(result.prompt, list)
    assert _ids(result.prompt_logprobs or ()) == result.prompt[first:]


def has_end_of_prompt(_sample: CompletionOutput, result: RequestOutput, _asked: SamplingParams) -> None:
    told = result.prompt_logprobs or ()
    assert isinstance(result.prompt, list)
    assert _ids(told) == result.prompt[START:]
    assert all(set(entry.top) == set(NAMED) for entry in told[:TOLD])


def _ids(entries: Sequence[Logprob]) -> list[int]:
    return [entry.token_id for entry in entries]


def is_flat(sample: CompletionOutput, result: RequestOutput, asked: SamplingParams) -> None:
    assert isinstance(sample.logprobs, FlatLogprobs)
    assert result.prompt_logprobs is None or isinstance(result.prompt_logprobs, FlatLogprobs)
    assert (result.prompt_logprobs is None) == (asked.prompt_logprobs is None and not asked.prompt_logprob_token_ids)


def has_no_text(sample: CompletionOutput, _result: RequestOutput, _asked: SamplingParams) -> None:
    assert sample.text == ""


def found_nothing_cached(_sample: CompletionOutput, result: RequestOutput, _asked: SamplingParams) -> None:
    assert result.cached_tokens == 0


def is_one_of_three(_sample: CompletionOutput, result: RequestOutput, _asked: SamplingParams) -> None:
    assert [sample.index for sample in result.outputs] == [0, 1, 2]


def is_best_first(_sample: CompletionOutput, result: RequestOutput, _asked: SamplingParams) -> None:
    scores = [sample.score for sample in result.outputs if sample.score is not None]
    assert len(scores) == len(result.outputs)
    assert scores == sorted(scores, reverse=True)
