"""Small stories with real entropy: what sampling is tested on.

Every choice in a story is peaked: one option has `PEAK` of the probability and the others share the rest evenly. So a
sampled story can go many ways, while greedy decoding has one answer, the story of all first options, far from any tie.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from random import Random

from tools.evals import vocabulary as v
from tools.evals.item import Item, Skill, Split, Verdict, draw, user

PEAK = 0.5
"""Probability of a choice's first option."""

SIZES = ("named", "animal", "free")

Choose = Callable[[Sequence[str]], str]

OPENINGS = (
    "Once upon a time there was a {mood} {hero} named {name}.",
    "Long ago there lived a {mood} {hero} whose name was {name}.",
    "This is the story of {name}, a {mood} {hero}.",
)
HOMES = (
    "{name} lived {home} and loved {food}.",
    "The home of {name} was {home}, where it was always {air}.",
    "{name} slept {home} and woke up early every day.",
)
WISHES = (
    "More than anything {name} wanted to {wish}.",
    "At night {name} dreamed of a day to {wish}.",
    "One thing was missing: {name} could not {wish}.",
)
TROUBLES = (
    "One {day} {name} found {find} {where}.",
    "Then {weather} came, and {name} had to hide {where}.",
    "Soon {name} lost {find} {where} and began to cry.",
    "On a {day} {name} heard a strange sound {where}.",
)
HELPERS = (
    'A {mood2} {friend} came by and said: "{line}"',
    'There {name} met a {mood2} {friend}, who said: "{line}"',
    '"{line}" called a {mood2} {friend}.',
)
DEEDS = (
    "Together they {deed}.",
    "So the two friends {deed}.",
    "They laughed, and then they {deed}.",
)
ENDINGS = (
    "From that day on {name} was never {sad} again.",
    "And when {name} came home, everybody was {glad}.",
    "Now {name} knew that {moral}.",
)
LAST = "The end."

SLOTS: dict[str, tuple[str, ...]] = {
    "mood": v.MOODS,
    "mood2": ("wise", "merry", "funny", "friendly", "tiny", "grumpy", "kind", "brave"),
    "hero": (*v.ANIMALS, *v.FOLK),
    "friend": ("owl", "turtle", "bear", "mole", "goose", "hedgehog", "swan", "raven", "snail", "otter"),
    "name": ("Tilda", "Milo", "Pia", "Otto", "Luca", "Wanda", "Hugo", "Lila", "Nils", "Flora"),
    "home": (
        "under an old oak",
        "near the sea",
        "behind the mill",
        "on a green hill",
        "in a hollow tree",
        "by the river",
    ),
    "food": ("honey", "apples", "berries", "warm soup", "fresh bread", "nuts"),
    "air": ("warm", "quiet", "windy", "cool and dark", "bright"),
    "wish": (
        "see the sea",
        "learn to fly",
        "find a friend",
        "sing a song",
        "reach the moon",
        "build a boat",
        "read a book",
    ),
    "day": ("morning", "evening", "rainy day", "winter night", "summer day"),
    "find": (
        "a golden key",
        "an old map",
        "a red kite",
        "a small bell",
        "a broken lantern",
        "a letter",
        "a silver coin",
    ),
    "where": (
        "in the forest",
        "near the bridge",
        "behind a stone",
        "at the lake",
        "in the tall grass",
        "under the snow",
    ),
    "weather": ("a storm", "the fog", "a cold wind", "heavy rain", "the first snow"),
    "line": (
        "Do not worry, I will help you!",
        "Come with me!",
        "I have been looking for that!",
        "Two are stronger than one.",
        "What a fine day for an adventure!",
        "Listen, and you will hear the way.",
    ),
    "deed": (
        "walked all night long",
        "crossed the river on a log",
        "opened a hidden door",
        "climbed the highest hill",
        "followed the stars",
        "shared their last piece of bread",
        "built a raft out of old wood",
    ),
    "sad": ("alone", "afraid", "sad", "bored", "hungry"),
    "glad": ("glad", "singing and dancing", "surprised", "waiting with a cake"),
    "moral": ("friends make every road short", "courage grows with every step", "home is where your friends are"),
}
ROUNDS = ("2", "1", "3")
"""How many times trouble comes: an option like any other, so the first is the likeliest."""


HEROES = ("fox", *(hero for hero in (*v.ANIMALS, *v.FOLK) if hero != "fox"))
"""Heroes of stories whose request names none."""

_SLOT = re.compile(r"\{(\w+)\}")


def peaked(rng: Random) -> Choose:
    """A chooser that takes the first option with probability PEAK and any other evenly."""

    def choose(options: Sequence[str]) -> str:
        return options[0] if rng.random() < PEAK else rng.choice(options[1:])

    return choose


def _first(options: Sequence[str]) -> str:
    return options[0]


def tell(choose: Choose, hero: str, name: str) -> str:
    """Returns a story about the hero with this name; `choose` picks templates and words, at random or as given."""

    def fill(templates: Sequence[str]) -> str:
        return _SLOT.sub(lambda slot: fixed.get(slot[1]) or choose(SLOTS[slot[1]]), choose(templates))

    fixed = {"hero": hero, "name": name}
    parts = [OPENINGS, HOMES, WISHES, *([TROUBLES, HELPERS, DEEDS] * int(choose(ROUNDS))), ENDINGS]
    return " ".join([*map(fill, parts), LAST])


_REQUESTS = {
    "named": ("Tell me a story about {a_hero} named {name}.", "Write a story about {name}, the {hero}."),
    "animal": (
        "Tell me a story about {a_hero}.",
        "Write a short story about {a_hero}.",
        "I want to hear about {a_hero}.",
    ),
}
_OPENERS = ("", "Please ", "Hi! Please ", "Now ", "Quick, ", "I am bored, ")
_VERBS = ("tell me", "write", "make up", "think of", "give me")
_THINGS = ("a story", "a short story", "a little story", "a tale", "a bedtime story")


def _free_request(rng: Random) -> str:
    text = f"{rng.choice(_OPENERS)}{rng.choice(_VERBS)} {rng.choice(_THINGS)}"
    return text[0].upper() + text[1:] + rng.choice((".", "!"))


def _request(rng: Random, size: str) -> tuple[str, str | None, str | None]:
    """Draws the request and the hero and name that it prescribes; None for what it leaves open."""
    if size == "free":
        return _free_request(rng), None, None
    hero, name = rng.choice(HEROES), v.first_name(rng)
    text = rng.choice(_REQUESTS[size]).format(hero=hero, a_hero=v.with_article(hero), name=name)
    return text, hero, name if size == "named" else None


def sample(rng: Random, split: Split, size: str) -> Item:
    """A request for a story; its words decide the split. The answer is drawn in training, the likeliest held back."""

    def candidate() -> tuple[str, tuple[str, str | None, str | None]]:
        request = _request(rng, size)
        return f"story|{request[0]}", request

    key, (text, hero, name) = draw(split, candidate)
    choose = peaked(rng) if split is Split.TRAIN else _first
    expected = tell(choose, hero or choose(HEROES), name or choose(SLOTS["name"]))
    return Item("story", size, (user(text),), expected, key, max_tokens=256)


def _pattern(templates: Sequence[str]) -> str:
    """Returns a regular expression for any of the templates, whose slots match their words and the group `name`."""

    def slot(name: str) -> str:
        if name == "name":
            return "(?P=name)"
        return f"(?:{'|'.join(map(re.escape, SLOTS[name]))})"

    def one(template: str) -> str:
        # Split on slots, what stands between is at even places: only that may be escaped.
        pieces = _SLOT.split(template)
        return "".join(slot(piece) if i % 2 else re.escape(piece) for i, piece in enumerate(pieces))

    return f"(?:{'|'.join(map(one, templates))})"


@cache
def _grammar() -> re.Pattern[str]:
    """All stories as one pattern. The name is found by looking ahead, so that every later one must be the same."""
    names = r"(?=.*?(?:named|name was|story of) (?P<name>[A-Z][a-z]+))"
    trouble = f"(?:{_pattern(TROUBLES)} {_pattern(HELPERS)} {_pattern(DEEDS)} ){{1,3}}"
    opening = " ".join(map(_pattern, (OPENINGS, HOMES, WISHES)))
    return re.compile(f"{names}{opening} {trouble}{_pattern(ENDINGS)} {re.escape(LAST)}")


def check(item: Item, text: str) -> Verdict:
    """Valid: a story that the grammar can tell. Right: the likeliest one, which greedy decoding gives."""
    return Verdict(valid=_grammar().fullmatch(text.strip()) is not None, right=text.strip() == item.expected)


SKILL = Skill("story", SIZES, sample, check)
