"""Mutations of answers with the faults of real models: a token dropped, doubled, out of order, misspelled, or a cut."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from random import Random

TAG = r"</?[^<>\s]{1,40}(?: name=\"[^\"<>]*\"(?: string=\"\w*\")?)?>|\[/?[A-Z_]+\]"
TOKEN = re.compile(rf"{TAG}|\w+|\s+|[^\w\s]")
Tokens = list[str]


def tokens(text: str) -> Tokens:
    return TOKEN.findall(text)


def dropped(found: Tokens, random: Random) -> Tokens:
    place = _place(found, random)
    return found[:place] + found[place + 1 :]


def doubled(found: Tokens, random: Random) -> Tokens:
    place = _place(found, random)
    return [*found[: place + 1], *found[place:]]


def swapped(found: Tokens, random: Random) -> Tokens:
    place = min(_place(found, random), len(found) - 2)
    return [*found[:place], found[place + 1], found[place], *found[place + 2 :]]


def cut(found: Tokens, random: Random) -> Tokens:
    return found[: random.randrange(len(found))]


def misspelled(found: Tokens, random: Random) -> Tokens:
    place = _place(found, random)
    token = found[place]
    at = random.randrange(len(token))
    return [*found[:place], token[:at] + token[at + 1 :], *found[place + 1 :]]


def _place(found: Sequence[str], random: Random) -> int:
    """Returns a random position; markup is as likely as everything else together."""
    tags = [place for place, token in enumerate(found) if re.fullmatch(TAG, token)]
    return random.choice(tags) if tags and random.random() < 0.5 else random.randrange(len(found))


MUTATIONS: tuple[Callable[[Tokens, Random], Tokens], ...] = (dropped, doubled, swapped, cut, misspelled)


def mutated(text: str, random: Random) -> str:
    """Returns the text with one fault, sometimes two."""
    found = tokens(text)
    for _ in range(random.choice((1, 1, 1, 2))):
        if len(found) > 2:
            found = random.choice(MUTATIONS)(found, random)
    return "".join(found)
