"""Texts inside of a grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Tokens of a vocabulary that a grammar has to name: no text spells them."""

    ids: Mapping[str, int] = field(default_factory=dict)  # by what they look like
    in_text: frozenset[int] = frozenset()  # those that any text may hold: marks of reasoning, for example


NO_SPECIAL_TOKENS = SpecialTokens()


def quoted(text: str) -> str:
    """Spelled by ordinary tokens."""
    return json.dumps(text, ensure_ascii=False)


def token(token_id: int) -> str:
    return f"<[{token_id}]>"


def literal(text: str, specials: SpecialTokens) -> str:
    """As its author means it: where it names a special token, that token."""
    parts = pieces(text, specials)
    return " ".join(quoted(part) if token_id is None else token(token_id) for part, token_id in parts)


def pieces(text: str, specials: SpecialTokens) -> Iterator[tuple[str, int | None]]:
    """Its parts, each with the id of the special token that it names, if it does."""
    if not specials.ids:
        yield text, None
        return
    names = "|".join(re.escape(name) for name in sorted(specials.ids, key=len, reverse=True))
    parts = [part for part in re.split(f"({names})", text) if part]
    for part in parts or [""]:
        yield part, specials.ids.get(part)
