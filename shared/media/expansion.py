"""Expansion of a prompt's placeholders: the token that the template writes for a picture becomes the picture's
tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import MediaProcessor, PlaceholderExpansion, PromptTokenizer

# Function of two neighbouring tokens that returns the single token of their joined text; None: both stay.
Join = Callable[[int, int], int | None]


class ExpandedItem(NamedTuple):
    """Range of one item in the expanded prompt."""

    offset: int
    length: int
    runs: tuple[tuple[int, int], ...]  # (start, length), relative to `offset`: positions that take rows


class ExpandedPrompt(NamedTuple):
    """Prompt with the tokens of its items."""

    token_ids: list[int]
    items: list[ExpandedItem]


@runtime_checkable
class JoiningProcessor(Protocol):
    """Extension of processors whose expansions begin or end with text: a tokenizer that sees the whole prompt at once
    may join it with the text around."""

    def joined(self, left: int, right: int, tokenizer: PromptTokenizer) -> int | None:
        """Returns the token that the tokenizer makes of the text of two tokens; None: both stay."""


def joins_of(processor: MediaProcessor, tokenizer: PromptTokenizer) -> Join | None:
    """Returns the function that joins tokens at the borders of a family's expansions; None if the family joins none."""
    if not isinstance(processor, JoiningProcessor):
        return None
    return lambda left, right: processor.joined(left, right, tokenizer)


def expand_placeholders(
    token_ids: Sequence[int], placeholder: int, expansions: Sequence[PlaceholderExpansion], join: Join | None = None
) -> ExpandedPrompt:
    """Replaces the first placeholders by `expansions`, in order. There must be at least as many placeholders. Tokens
    that are joined belong to no item."""
    return expand_each(token_ids, [(placeholder, expansion) for expansion in expansions], join)


def expand_each(
    token_ids: Sequence[int], expansions: Sequence[tuple[int, PlaceholderExpansion]], join: Join | None = None
) -> ExpandedPrompt:
    """Replaces placeholders of several kinds: each expansion comes with the token that it replaces, in the order in
    which these stand in the prompt. Tokens that are joined belong to no item."""
    prompt = ExpandedPrompt([], [])
    begin = 0
    for placeholder, expansion in expansions:
        at = token_ids.index(placeholder, begin)
        _append(prompt, token_ids[begin:at], join if prompt.items else None)
        num_cut = _append(prompt, expansion.token_ids, join)
        length = len(expansion.token_ids) - num_cut
        runs = tuple((start - num_cut, count) for start, count in expansion.runs)
        prompt.items.append(ExpandedItem(len(prompt.token_ids) - length, length, runs))
        begin = at + 1
    _append(prompt, token_ids[begin:], join if prompt.items else None)
    return prompt


def without_frame(token_ids: Sequence[int], placeholder: int, around: tuple[int, int]) -> list[int]:
    """Returns the tokens without those directly before and after each placeholder, where both are the ones of
    `around`."""
    framed = (around[0], placeholder, around[1])
    kept: list[int] = []
    number = 0
    while number < len(token_ids):
        is_framed = tuple(token_ids[number : number + len(framed)]) == framed
        kept.append(placeholder if is_framed else token_ids[number])
        number += len(framed) if is_framed else 1
    return kept


def over_the_prompt(prompt: ExpandedPrompt) -> ExpandedPrompt:
    """Returns the prompt with its only item extended to all tokens, which see each other. Raises InvalidArgument for
    several items."""
    if len(prompt.items) > 1:
        raise InvalidArgument(
            f"At most 1 image(s) may be provided in one prompt: all tokens of this model's prompt see each other. This "
            f"prompt has {len(prompt.items)}.",
            field="messages",
        )
    whole = [
        ExpandedItem(0, len(prompt.token_ids), tuple((item.offset + start, count) for start, count in item.runs))
        for item in prompt.items
    ]
    return ExpandedPrompt(prompt.token_ids, whole)


def _append(prompt: ExpandedPrompt, tokens: Sequence[int], join: Join | None) -> int:
    """Appends tokens, the first of them perhaps joined with the last one of the prompt; returns the number of tokens
    that were joined, 0 or 1."""
    before, items = prompt.token_ids, prompt.items
    joined = join(before[-1], tokens[0]) if join and before and tokens else None
    if joined is None:
        before.extend(tokens)
        return 0
    if items and items[-1].offset + items[-1].length == len(before):
        items[-1] = items[-1]._replace(length=items[-1].length - 1)
    before[-1] = joined
    before.extend(tokens[1:])
    return 1
