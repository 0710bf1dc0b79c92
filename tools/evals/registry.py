"""The table of skills, and the two things a caller does with it: get items, check answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from itertools import count
from random import Random

from tools.evals.item import Item, Skill, Split, Verdict

SKILLS: dict[str, str] = {
    "recall": "tools.evals.recall",
    "arithmetic": "tools.evals.arithmetic",
    "json": "tools.evals.json_object",
    "tools": "tools.evals.tools",
    "lists": "tools.evals.lists",
    "counting": "tools.evals.counting",
    "echo": "tools.evals.echo",
    "story": "tools.evals.story",
    "small_talk": "tools.evals.small_talk",
    "conversation": "tools.evals.conversation",
}
"""Name to the module whose `SKILL` it is."""

PICTURE_SKILLS: dict[str, str] = {
    "picture_digits": "tools.evals.pictures.digits",
    "picture_shapes": "tools.evals.pictures.shapes",
    "picture_words": "tools.evals.pictures.words",
}
"""Skills whose questions have a picture, which need numpy and Pillow."""

MODULES = SKILLS | PICTURE_SKILLS


def load(name: str) -> Skill:
    """The skill of this name. Raises KeyError, listing what exists, for another name."""
    if name not in MODULES:
        raise KeyError(f"no skill {name!r}; there are: {', '.join(MODULES)}")
    skill: Skill = import_module(MODULES[name]).SKILL
    return skill


def items(name: str, split: Split, size: str, group: int = 1) -> Iterator[Item]:
    """Items of one skill and size class without end, the same on every machine and in every run.

    Where the skill has shared prompts, each `group` items in a row share one (a document asked about `group` times).
    """
    skill = load(name)
    if size not in skill.sizes:
        raise KeyError(f"skill {name!r} has no size {size!r}; there are: {', '.join(skill.sizes)}")
    for index in count():
        # A generator of its own for each group: any of them can be drawn without those before it.
        rng = Random(f"quire-tiny/{name}/{split}/{size}/{index}")
        if skill.sample_group is None:
            yield skill.sample(rng, split, size)
        else:
            yield from skill.sample_group(rng, split, size, group)


def held_back_items(per_size: int, names: Sequence[str] = tuple(SKILLS), group: int = 4) -> list[Item]:
    """The evaluation set: `per_size` distinct held-back items of every size class of these skills.

    A class with fewer distinct keys (sums of two one-digit numbers) gives what it has.
    """
    chosen: list[Item] = []
    for name in names:
        for size in load(name).sizes:
            chosen += _distinct(items(name, Split.HELD_BACK, size, group), per_size)
    return chosen


def _distinct(source: Iterator[Item], wanted: int) -> list[Item]:
    """The first `wanted` items with distinct prompts, or fewer when new ones have become too rare."""
    found: dict[str, Item] = {}
    for tried, item in enumerate(source):
        if len(found) == wanted or tried >= 20 * wanted:
            break
        found.setdefault(item.key, item)
    return list(found.values())


def check(item: Item, text: str) -> Verdict:
    """Judge a model's answer to an item."""
    return load(item.skill).check(item, text)
