"""Sampling parameters that services interpret alike: greedy decoding, and the positions of prompt log-probabilities."""

from __future__ import annotations

from quire.shared.pb.common.v1 import sampling_pb2

GREEDY_BELOW = 1e-5


def is_greedy(temperature: float) -> bool:
    return temperature < GREEDY_BELOW


def first_prompt_logprob(sampling: sampling_pb2.SamplingParams) -> int:
    """Returns the first prompt position whose log-probabilities are requested; 0: none. Position 0 has no preceding
    token."""
    if not sampling.HasField("prompt_logprobs") and not sampling.prompt_logprob_token_ids:
        return 0
    return max(1, sampling.prompt_logprob_start)


def clear_prompt_logprobs(sampling: sampling_pb2.SamplingParams) -> None:
    """Removes the request for prompt log-probabilities."""
    for field in ("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"):
        sampling.ClearField(field)


def resume_prompt_logprobs_at(sampling: sampling_pb2.SamplingParams, position: int, num_prompt_tokens: int) -> None:
    """Restricts the request to the prompt positions from `position` on, because those before have been returned;
    removes it if none is left."""
    if position >= num_prompt_tokens:
        clear_prompt_logprobs(sampling)
        return
    if sampling.prompt_logprob_token_ids:
        del sampling.prompt_logprob_token_ids[: position - sampling.prompt_logprob_start]
        if not sampling.prompt_logprob_token_ids:
            sampling.prompt_logprobs = 0  # positions after the last list report their own token only
    sampling.prompt_logprob_start = position
