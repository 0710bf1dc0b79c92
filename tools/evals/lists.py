"""Reversing and sorting lists of words and of numbers."""

from __future__ import annotations

from random import Random

from tools.evals import vocabulary as v
from tools.evals.item import Item, Skill, Split, draw, exact, user

REVERSE = (
    "Reverse this list: {list}",
    "Write this list backwards: {list}",
    "Give this list in reverse order: {list}",
    "Reverse: {list}",
)
ASCENDING = (
    "Sort these numbers: {list}",
    "Sort from smallest to largest: {list}",
    "Order these numbers upwards: {list}",
    "Sort: {list}",
)
DESCENDING = ("Sort from largest to smallest: {list}", "Order these numbers downwards: {list}")
ALPHABETICAL = (
    "Sort these words: {list}",
    "Sort alphabetically: {list}",
    "Put these words in alphabetical order: {list}",
    "Sort: {list}",
)

LENGTHS: dict[str, tuple[int, int]] = {"short": (2, 4), "medium": (5, 7), "long": (8, 10)}
KINDS = ("reverse-words", "reverse-numbers", "sort-words", "sort-numbers")
SIZES = tuple(f"{kind}-{length}" for kind in KINDS for length in LENGTHS)


def _entries(rng: Random, kind: str, count: int) -> list[str]:
    """Draws `count` distinct entries of a kind: letters, listed or strange words, or numbers below 100 or 1000."""
    if kind.endswith("words"):
        if rng.random() < 0.1:
            return rng.sample(v.LETTERS, count)
        entries = rng.sample(v.LIST_WORDS, count)
        # Words on no list can be turned around. Where they belong in the alphabet is more than their tokens tell.
        return [v.strange(rng) if kind == "reverse-words" and rng.random() < 0.1 else entry for entry in entries]
    # Half the lists of numbers stay below 100, where neighbours are close and order is easy to get wrong.
    return [str(n) for n in rng.sample(range(100 if rng.random() < 0.5 else 1000), count)]


def _answer(rng: Random, kind: str, entries: list[str]) -> tuple[str, list[str]]:
    """The instruction with `{list}` in it, and the list it leads to."""
    if kind.startswith("reverse"):
        return rng.choice(REVERSE), entries[::-1]
    if kind == "sort-words":
        return rng.choice(ALPHABETICAL), sorted(entries)
    descending = rng.random() < 0.4
    return rng.choice(DESCENDING if descending else ASCENDING), sorted(entries, key=int, reverse=descending)


def sample(rng: Random, split: Split, size: str) -> Item:
    """A list to reverse or to sort; the list as given decides the split."""
    kind, length = size.rsplit("-", 1)

    def candidate() -> tuple[str, list[str]]:
        entries = _entries(rng, kind, rng.randint(*LENGTHS[length]))
        return f"list|{','.join(entries)}", entries

    key, entries = draw(split, candidate)
    instruction, answer = _answer(rng, kind, entries)
    question = instruction.format(list=("," if rng.random() < 0.08 else ", ").join(entries))
    return Item("lists", size, (user(question),), ", ".join(answer), key, max_tokens=96)


SKILL = Skill("lists", SIZES, sample, exact)
