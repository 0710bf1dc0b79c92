"""Limits of a prompt's length and of the output after it, and tokenization within them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from quire.services.frontend.bounds.prompts import TOO_LONG, PromptLimit, check_characters, check_length
from quire.services.frontend.request.request import (
    ChatPrompt,
    PairPrompt,
    Prompt,
    Request,
    Sampling,
    TextPrompt,
    TokenPrompt,
)
from quire.services.frontend.tokenizer.encoder import Tokenized
from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.columns import i32_bytes
from quire.shared.errors import InvalidArgument

FIT_TO_CONTEXT = -1  # truncate_prompt_tokens: keep as many as leave space for the output
SIDES = ("left", "right")


def check_truncation_side(side: str) -> None:
    if side not in SIDES:
        raise InvalidArgument(f"truncation_side must be 'left' or 'right', got {side!r}.", field="truncation_side")


def check_num_samples(request: Request, most: int) -> None:
    """Raises InvalidArgument if a request has more prompts, samples counted, than the server accepts."""
    if request.num_samples > most:
        counted = "samples" if request.pooling is None else "inputs"
        text = (
            f"a request may have at most {most} {counted} in all, got {request.num_samples}; send several requests, "
            "or start the server with a larger --max-prompts-per-request"
        )
        raise InvalidArgument(text, field="prompt" if len(request.prompts) > 1 else "n")


def truncate(token_ids: Sequence[int], request: Request, max_model_len: int) -> Sequence[int]:
    """Returns at most max_kept_tokens() tokens: the last ones, or the first ones if truncation_side is "right"."""
    keep = max_kept_tokens(request, max_model_len)
    if keep is None:
        return token_ids
    return token_ids[:keep] if request.truncation_side == "right" else token_ids[-keep:]


def truncate_framed(
    token_ids: Sequence[int], request: Request, max_model_len: int, frame: tuple[list[int], list[int]]
) -> Sequence[int]:
    """Truncates a prompt but keeps the special tokens around the text, if they fit."""
    keep, (before, after) = max_kept_tokens(request, max_model_len), frame
    if keep is None or len(token_ids) <= keep:
        return token_ids
    if keep <= len(before) + len(after):
        return truncate(token_ids, request, max_model_len)
    if request.truncation_side == "right":
        return [*token_ids[: keep - len(after)], *after]
    return [*before, *token_ids[len(before) - keep :]]


def max_kept_tokens(request: Request, max_model_len: int) -> int | None:
    """Returns the maximum number of a prompt's tokens to keep, None for all. FIT_TO_CONTEXT leaves room for
    max_tokens; raises InvalidArgument if the number does not lie in [1, max_model_len]."""
    keep = request.truncate_prompt_tokens
    if keep is None:
        return None
    if keep == FIT_TO_CONTEXT:
        keep = max_model_len - (0 if request.pooling is not None else request.sampling.max_tokens or 1)
    if not 1 <= keep <= max_model_len:
        raise InvalidArgument(
            f"truncate_prompt_tokens must be in [1, {max_model_len}], got {keep}.", field="truncate_prompt_tokens"
        )
    return keep


def check_uncut(length: int, request: Request, max_model_len: int) -> None:
    """Raises InvalidArgument if a prompt with pictures, which is never cut, has more tokens than the request keeps."""
    keep = max_kept_tokens(request, max_model_len)
    if keep is not None and length > keep:
        raise InvalidArgument(
            f"truncate_prompt_tokens: the prompt has {length} tokens, of which {keep} may be kept; a prompt with "
            "pictures is not cut. Send fewer pictures or less text.",
            field="truncate_prompt_tokens",
            reason=TOO_LONG,
        )


def check_vocabulary(token_ids: Sequence[int], vocab_size: int) -> npt.NDArray[Any]:
    """Returns the ids as an array; raises InvalidArgument for an id outside the vocabulary."""
    ids = np.asarray(token_ids)
    if ids.size and (ids.max() >= vocab_size or ids.min() < 0):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise InvalidArgument(f"Token id {wrong} is out of vocabulary", field="prompt")
    return ids


def column(token_ids: Sequence[int], max_model_len: int, vocab_size: int, *, generates: bool = True) -> bytes:
    """Returns the ids of a prompt as an i32 column; raises InvalidArgument.

    The ids are checked and copied as an array: one by one would take longer than the rest of a request.
    """
    if not len(token_ids):
        raise InvalidArgument("prompt: it is empty; send at least one token", field="prompt")
    ids = check_vocabulary(token_ids, vocab_size)
    check_length(len(ids), max_model_len, is_continued=generates)
    return i32_bytes(ids)


def check_output(request: Request, max_model_len: int) -> None:
    """Raises InvalidArgument if max_tokens alone reaches the context length and the request is strict about lengths;
    passes while `max_model_len` is 0, unknown."""
    requested = request.sampling.max_tokens or 0
    if request.strict_length and 0 < max_model_len <= requested:
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested} output "
            "tokens. Please reduce the number of requested output tokens.",
            field="max_tokens",
            reason=TOO_LONG,
        )


def check_prompt_logprobs(sampling: Sampling, num_prompt_tokens: int) -> None:
    """Checks that the positions of the requested prompt log-probabilities exist in the prompt."""
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
    """Returns the number of tokens to generate: max_tokens, else the model's `recommended` number, else the
    request's default, else the rest of the context. Clips to the rest, but raises InvalidArgument if a strict
    request asks for more."""
    num_available = max_model_len - num_prompt_tokens
    requested = request.sampling.max_tokens
    if requested is None:
        default = recommended if recommended is not None else request.default_max_tokens
        return num_available if default is None else min(default, num_available)
    if requested > num_available and request.strict_length:
        raise InvalidArgument(
            f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested} output "
            f"tokens and your prompt contains {num_prompt_tokens} input tokens, for a total of "
            f"{requested + num_prompt_tokens} tokens. Please reduce the length of the input "
            "prompt or the number of requested output tokens.",
            field="max_tokens",
            reason=TOO_LONG,
        )
    return min(requested, num_available)


class PromptTokens:
    """Reader of prompts of every kind with the model's tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    async def tokenize(self, prompt: Prompt, max_model_len: int, stop_after: int | None = None) -> Tokenized:
        """Tokenizes a prompt; token prompts are neither checked nor copied.

        `stop_after`: the ids of a long text may be cut off once there are more than this.
        """
        self.check_characters(prompt, max_model_len)
        match prompt:
            case TokenPrompt(token_ids, media):
                return Tokenized(token_ids, media=range(len(media)))
            case PairPrompt(first, second):
                return await self._tokenizer.encode_pair(first, second, stop_after)
            case TextPrompt(text, framed):
                ids = await self._tokenizer.encode_prompt(text, add_special_tokens=framed, stop_after=stop_after)
                return Tokenized(ids, media=range(len(prompt.media)))
            case ChatPrompt():
                return await self._tokenizer.tokenize_chat(prompt, stop_after)

    def check_characters(self, prompt: Prompt, max_model_len: int) -> None:
        """Raises InvalidArgument for a text that cannot fit; `max_model_len`: 0 while no worker has reported it."""
        if not isinstance(prompt, TokenPrompt):
            check_characters(prompt, PromptLimit(max_model_len, self._tokenizer.longest_token))
