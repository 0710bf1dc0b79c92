"""Expansion of a prompt's placeholders: the tokens of each picture in the place of the one that the template wrote."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from quire.shared.media.processor import MediaProcessor, PlaceholderExpansion, PromptTokenizer, TileLayout


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
        """Returns the token for the text of two tokens, which the tokenizer prefers to both; None: they stay."""


def expand_placeholders(
    processor: MediaProcessor, token_ids: Sequence[int], layouts: Sequence[TileLayout], tokenizer: PromptTokenizer
) -> ExpandedPrompt:
    """Replaces the first placeholders by the expansions of `layouts`, in order. Placeholders must be as many as
    layouts or more; the caller checks that."""
    tokens: list[int] = []
    items: list[ExpandedItem] = []
    join = processor.joined if isinstance(processor, JoiningProcessor) else None
    at_border = False  # the last token ends an expansion
    pending = iter(layouts)
    for token in token_ids:
        layout = next(pending, None) if token == processor.placeholder else None
        if layout is None:
            joined = join(tokens[-1], token, tokenizer) if join and at_border else None
            _append(tokens, items, token, joined, shrinks=at_border)
            at_border = False
            continue
        expansion = processor.expand(layout, tokenizer)
        joined = join(tokens[-1], expansion.token_ids[0], tokenizer) if join and tokens else None
        items.append(_placed(tokens, items, expansion, joined, shrinks=at_border))
        at_border = True
    return ExpandedPrompt(tokens, items)


def _append(tokens: list[int], items: list[ExpandedItem], token: int, joined: int | None, *, shrinks: bool) -> None:
    """Appends a token, or replaces the last one by `joined`, which then is no longer part of the last item
    (`shrinks`)."""
    if joined is None:
        tokens.append(token)
        return
    tokens[-1] = joined
    if shrinks:
        items[-1] = items[-1]._replace(length=items[-1].length - 1)


def _placed(
    tokens: list[int], items: list[ExpandedItem], expansion: PlaceholderExpansion, joined: int | None, *, shrinks: bool
) -> ExpandedItem:
    """Appends an expansion to `tokens` and returns its range. A `joined` token is part of no item."""
    cut = 0 if joined is None else 1
    if joined is not None:
        _append(tokens, items, joined, joined, shrinks=shrinks)
    offset = len(tokens)
    tokens.extend(expansion.token_ids[cut:])
    runs = tuple((start - cut, length) for start, length in expansion.runs)
    return ExpandedItem(offset, len(tokens) - offset, runs)
