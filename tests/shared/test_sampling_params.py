"""Remaining prompt log-probabilities of a sequence that continues on another worker."""

from __future__ import annotations

import pytest

from quire.shared.pb.common.v1 import sampling_pb2
from quire.shared.sampling_params import first_prompt_logprob, resume_prompt_logprobs_at

NAMED = [[1], [2, 3], [4]]  # of positions 5, 6 and 7 in a prompt of 10 tokens


@pytest.mark.parametrize(("position", "left"), [(5, NAMED), (6, NAMED[1:]), (7, NAMED[2:]), (8, []), (9, [])])
def test_named_tokens_of_positions_that_are_left(position: int, left: list[list[int]]) -> None:
    """Positions after the last list report their own token only."""
    lists = [sampling_pb2.NamedTokens(ids=ids) for ids in NAMED]
    sampling = sampling_pb2.SamplingParams(prompt_logprob_start=5, prompt_logprob_token_ids=lists)
    resume_prompt_logprobs_at(sampling, position, 10)
    assert [list(named.ids) for named in sampling.prompt_logprob_token_ids] == left
    assert first_prompt_logprob(sampling) == position
    assert left or sampling.prompt_logprobs == 0


def test_nothing_is_left_once_all_is_told() -> None:
    sampling = sampling_pb2.SamplingParams(prompt_logprobs=2)
    resume_prompt_logprobs_at(sampling, 4, 10)
    assert (first_prompt_logprob(sampling), sampling.prompt_logprobs) == (4, 2)
    resume_prompt_logprobs_at(sampling, 10, 10)
    assert first_prompt_logprob(sampling) == 0
