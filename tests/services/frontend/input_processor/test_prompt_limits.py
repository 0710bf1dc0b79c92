"""Tests of empty, too long and out-of-vocabulary prompts, and of the output length after valid ones."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from quire.services.frontend.input_processor import prompt_limits
from quire.services.frontend.request.request import Request, Sampling, TokenPrompt
from quire.shared.errors import InvalidArgument


def request(max_tokens: int | None = None, **fields: object) -> Request:
    sampling = Sampling(max_tokens=max_tokens)
    return Request("r", "", [TokenPrompt([1])], sampling, 0.0, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "it is empty"),
        ([1, 50], "Token id 50 is out of vocabulary"),
        ([-1], "Token id -1 is out of vocabulary"),
        ([1] * 11, "This model's maximum context length is 10 tokens. However, your prompt resulted in 11 tokens"),
        ([1] * 10, "This model's maximum context length is 10 tokens. However, your prompt resulted in 10 tokens"),
    ],
)
def test_refused_prompts(ids: list[int], text: str) -> None:
    with pytest.raises(InvalidArgument) as refusal:
        prompt_limits.column(ids, max_model_len=10, vocab_size=50)
    assert text in refusal.value.message


@pytest.mark.parametrize("ids", [[7, 0, 49], array("I", [7, 0, 49]), array("q", [7, 0, 49])])
def test_ids_become_one_column_however_they_were_sent(ids: Sequence[int]) -> None:
    assert prompt_limits.column(ids, max_model_len=10, vocab_size=50) == array("i", [7, 0, 49]).tobytes()


@pytest.mark.parametrize("wrong", [2**31, 2**32 + 7, 2**63, 2**70, -(2**40)])
def test_ids_that_fit_no_column_are_out_of_vocabulary(wrong: int) -> None:
    with pytest.raises(InvalidArgument, match=f"Token id {wrong} is out of vocabulary"):
        prompt_limits.column([1, wrong], max_model_len=10, vocab_size=50)


def test_the_output_length_is_requested_recommended_default_or_maximal() -> None:
    assert prompt_limits.output_length(request(), 4, 10, None) == 6
    assert prompt_limits.output_length(request(), 4, 10, 3) == 3
    assert prompt_limits.output_length(request(default_max_tokens=2), 4, 10, None) == 2
    assert prompt_limits.output_length(request(default_max_tokens=16), 4, 10, None) == 6
    assert prompt_limits.output_length(request(5), 4, 10, 3) == 5


def test_more_output_than_fits_is_cut_or_refused() -> None:
    assert prompt_limits.output_length(request(7), 4, 10, None) == 6
    with pytest.raises(InvalidArgument, match="maximum context length is 10 tokens") as refusal:
        prompt_limits.output_length(request(7, strict_length=True), 4, 10, None)
    assert refusal.value.field == "max_tokens"


def test_truncation_keeps_the_end() -> None:
    ids = list(range(9))
    assert prompt_limits.truncate(ids, request(), 8) == ids
    assert prompt_limits.truncate(ids, request(truncate_prompt_tokens=3), 8) == [6, 7, 8]
    assert prompt_limits.truncate(ids, request(2, truncate_prompt_tokens=-1), 8) == ids[-6:]
    with pytest.raises(InvalidArgument, match=r"truncate_prompt_tokens must be in \[1, 8\], got 9"):
        prompt_limits.truncate(ids, request(truncate_prompt_tokens=9), 8)
