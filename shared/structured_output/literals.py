"""Literal texts in a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Special tokens of a vocabulary, which no ordinary tokens can spell and which a grammar must reference by id."""

    ids: Mapping[str, int] = field(default_factory=dict)  # by their text
    in_text: frozenset[int] = frozenset()  # tokens allowed in free text, such as reasoning markers


NO_SPECIAL_TOKENS = SpecialTokens()


def quoted(text: str) -> str:
    """Returns a literal that ordinary tokens spell."""
    return json.dumps(text, ensure_ascii=False)


def token(token_id: int) -> str:
    return f"<[{token_id}]>"


def literal(text: str, specials: SpecialTokens) -> str:
    """Returns a literal in which names of special tokens stand for these tokens."""
    parts = pieces(text, specials)
    return " ".join(quoted(part) if token_id is None else token(token_id) for part, token_id in parts)


def pieces(text: str, specials: SpecialTokens) -> Iterator[tuple[str, int | None]]:
    """Splits a text at the names of special tokens; yields each piece with the token's id, or None."""
    if not specials.ids:
        yield text, None
        return
    names = "|".join(re.escape(name) for name in sorted(specials.ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    for part in parts or [""]:
        yield part, specials.ids.get(part)
