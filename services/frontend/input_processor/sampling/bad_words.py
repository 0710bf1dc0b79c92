"""Banned texts as token sequences."""

from __future__ import annotations

from collections.abc import Iterable

from quire.services.frontend.tokenizer.tokenizer import Tokenizer
from quire.shared.columns import i32_bytes


async def bad_word_columns(words: Iterable[str], tokenizer: Tokenizer) -> tuple[bytes, ...]:
    """Returns the token columns of each word at the start of a text and after a space."""
    columns: dict[bytes, None] = {}
    spellings = [spelling for word in words for spelling in (word, " " + word.lstrip())]
    if not spellings:
        return ()
    for ids in await tokenizer.encode_all(spellings):
        if ids:
            columns[i32_bytes(ids)] = None
    return tuple(columns)
