"""What is left of a wish for log-probabilities of the prompt, once some of them are known."""

from __future__ import annotations

from quire.shared.pb.common.v1 import sampling_pb2


def first_position(sampling: sampling_pb2.SamplingParams) -> int:
    """The first prompt position that is asked for; 0 if none is. Position 0 has nothing before it."""
    if not sampling.HasField("prompt_logprobs") and not sampling.prompt_logprob_token_ids:
        return 0
    return max(1, sampling.prompt_logprob_start)


def clear(sampling: sampling_pb2.SamplingParams) -> None:
    """Nothing is asked for any more."""
    for field in ("prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"):
        sampling.ClearField(field)


def resume_at(sampling: sampling_pb2.SamplingParams, position: int, num_prompt_tokens: int) -> None:
    """Asks for what comes from `position` on, of what `sampling` asks for."""
    if position >= num_prompt_tokens:
        clear(sampling)
        return
    if sampling.prompt_logprob_token_ids:
        del sampling.prompt_logprob_token_ids[: position - sampling.prompt_logprob_start]
        if not sampling.prompt_logprob_token_ids:
            sampling.prompt_logprobs = 0  # positions behind the last list get their own token's
    sampling.prompt_logprob_start = position
