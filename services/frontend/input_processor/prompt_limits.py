"""How long a prompt may be and how much may follow it."""

from __future__ import annotations

from collections.abc import Sequence

from services.frontend.request import Request, Sampling
from shared.errors import InvalidArgument

AS_FITS = -1  # truncate_prompt_tokens: as many as leave room for the output
SIDES = ("left", "right")
TOO_LONG = "context_length_exceeded"  # OpenAI's word


def check_truncation_side(side: str) -> None:
    if side not in SIDES:
        raise InvalidArgument(f"truncation_side must be 'left' or 'right', got {side!r}.", field="truncation_side")


def truncate(token_ids: list[int], request: Request, max_model_len: int) -> list[int]:
    """Keeps the last tokens of the prompt, or the first, if the request says so."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return token_ids
    if keep == AS_FITS:
        keep = max_model_len - (request.sampling.max_tokens or 1)
    if not 1 <= keep <= max_model_len:
        raise InvalidArgument(
            f"truncate_prompt_tokens must be in [1, {max_model_len}], got {keep}.", field="truncate_prompt_tokens"
        )
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> None:
    if token_ids and (max(token_ids) >= vocab_size or min(token_ids) < 0):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidArgument(f"Token id {wrong} is out of vocabulary", field="prompt")


def check_prompt(token_ids: Sequence[int], max_model_len: int, vocab_size: int) -> None:
    if not token_ids:
        raise InvalidArgument("prompt: it is empty; send at least one token", field="prompt")
    check_vocabulary(token_ids, vocab_size)
    check_length(len(token_ids), max_model_len)


def check_length(length: int, max_model_len: int) -> None:
    """Of a prompt in tokens: it has to leave room for one more."""
    if length >= max_model_len:
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt has {length} tokens, "
            "and at least one is left for the output. Please reduce its length.",
            field="prompt",
            reason=TOO_LONG,
        )


def check_output(request: Request, max_model_len: int) -> None:
    """That some prompt could have it; `max_model_len`: 0 while nobody knows it."""
    asked = request.sampling.max_tokens or 0
    if request.strict_length and 0 < max_model_len <= asked:
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output "
            "tokens. Please reduce the number of requested output tokens.",
            field="max_tokens",
            reason=TOO_LONG,
        )


def check_prompt_logprobs(sampling: Sampling, num_prompt_tokens: int) -> None:
    """Where the first of them stands, and that none is asked for that the prompt does not have."""
    start, named = sampling.prompt_logprob_start, len(sampling.prompt_logprob_token_ids)
    if start >= num_prompt_tokens:
        message = f"prompt_logprob_start must be less than the prompt's length, {num_prompt_tokens}, got {start}."
        raise InvalidArgument(message, field="prompt_logprob_start")
    if start + named > num_prompt_tokens:
        message = (
            f"prompt_logprob_token_ids has {named} positions from {start} on; "
            f"the prompt has {num_prompt_tokens} tokens."
        )
        raise InvalidArgument(message, field="prompt_logprob_token_ids")


def output_length(request: Request, num_prompt_tokens: int, max_model_len: int, recommended: int | None) -> int:
    """max_tokens for this prompt; `recommended`: the model's own default."""
    room = max_model_len - num_prompt_tokens
    asked = request.sampling.max_tokens
    if asked is None:
        default = recommended if recommended is not None else request.default_max_tokens
        return room if default is None else min(default, room)
    if asked > room and request.strict_length:
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {asked} output "
            f"tokens and your prompt contains {num_prompt_tokens} input tokens, for a total of "
            f"{asked + num_prompt_tokens} tokens. Please reduce the length of the input "
            "prompt or the number of requested output tokens.",
            field="max_tokens",
            reason=TOO_LONG,
        )
    return min(asked, room)
