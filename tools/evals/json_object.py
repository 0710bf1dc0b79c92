"""Filling a JSON object from a sentence: which keys, and in which order, the prompt says."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.evals import vocabulary as v
from tools.evals.item import Item, Skill, Split, Verdict, draw, user

SIZES = ("1", "2", "3", "4", "5")
"""How many keys are asked for."""


@dataclass(frozen=True, slots=True)
class Field:
    """One slot of a frame: `keys` are the names a prompt may ask for it by, `spell` is how a sentence words it."""

    slot: str
    kind: str
    keys: tuple[str, ...]
    value: Callable[[Random], Any]
    spell: Callable[[Any], str] = str


@dataclass(frozen=True, slots=True)
class Frame:
    """A situation: its fields, and sentences that word all of them as `{slot}`."""

    name: str
    fields: tuple[Field, ...]
    sentences: tuple[str, ...]


def _word(words: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words)


def _between(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


def _coin(rng: Random) -> bool:
    return rng.random() < 0.5


def _either(yes: str, no: str) -> Callable[[Any], str]:
    return lambda value: yes if value else no


def _some_foods(rng: Random) -> list[str]:
    return rng.sample(v.FOODS, rng.randint(2, 3))


def _listed(values: list[str]) -> str:
    return f"{', '.join(values[:-1])} and {values[-1]}"


FRAMES: tuple[Frame, ...] = (
    Frame(
        "resident",
        (
            Field("person", "string", ("name", "person", "full_name"), v.person),
            Field("age", "integer", ("age", "years"), _between(18, 99)),
            Field("town", "string", ("town", "city", "home"), _word(v.TOWNS)),
            Field("job", "string", ("job", "profession"), _word(v.JOBS)),
            Field("married", "boolean", ("married",), _coin, _either("married", "not married")),
        ),
        (
            "{person} is {age} years old, is {married}, lives in {town} and works as a {job}.",
            "At the age of {age}, {person} is a {job} in {town} and is {married}.",
            "The {job} {person}, aged {age}, comes from {town} and is {married}.",
        ),
    ),
    Frame(
        "order",
        (
            Field("person", "string", ("customer", "buyer", "name"), v.person),
            Field("count", "integer", ("quantity", "count", "amount"), _between(2, 99)),
            Field("food", "string", ("item", "product", "goods"), _word(v.FOODS)),
            Field("price", "integer", ("price", "total"), _between(1, 500)),
            Field("paid", "boolean", ("paid",), _coin, _either("already paid", "not paid yet")),
        ),
        (
            "{person} ordered {count} boxes of {food} for {price} crowns and has {paid}.",
            "For {price} crowns {person} gets {count} boxes of {food}; the buyer has {paid}.",
            "{count} boxes of {food} go to {person} for {price} crowns, who has {paid}.",
        ),
    ),
    Frame(
        "meeting",
        (
            Field("person", "string", ("host", "organizer", "name"), v.person),
            Field("day", "string", ("day", "weekday"), _word(v.WEEKDAYS)),
            Field("time", "string", ("time", "start"), v.clock),
            Field("room", "integer", ("room", "room_number"), _between(1, 400)),
            Field("guests", "integer", ("guests", "people"), _between(2, 60)),
        ),
        (
            "{person} invites {guests} people on {day} at {time} in room {room}.",
            "On {day} at {time}, {guests} people will meet {person} in room {room}.",
            "Room {room} is booked by {person} for {guests} people on {day} at {time}.",
        ),
    ),
    Frame(
        "journey",
        (
            Field("origin", "string", ("from", "origin"), _word(v.TOWNS)),
            Field("goal", "string", ("to", "destination"), v.invented),
            Field("day", "string", ("day", "weekday"), _word(v.WEEKDAYS)),
            Field("time", "string", ("time", "departure"), v.clock),
            Field("platform", "integer", ("platform", "track"), _between(1, 30)),
        ),
        (
            "The train from {origin} to {goal} leaves on {day} at {time} from platform {platform}.",
            "On {day} at {time} a train goes from {origin} to {goal}, platform {platform}.",
            "From platform {platform} you can travel from {origin} to {goal} on {day} at {time}.",
        ),
    ),
    Frame(
        "animal",
        (
            Field("name", "string", ("name", "called"), _word(v.FIRST_NAMES)),
            Field("animal", "string", ("animal", "species"), _word(v.ANIMALS)),
            Field("colour", "string", ("colour", "color"), _word(v.COLOURS)),
            Field("age", "integer", ("age", "years"), _between(1, 20)),
            Field("tame", "boolean", ("tame",), _coin, _either("tame", "wild")),
        ),
        (
            "{name} is a {tame} {colour} {animal} of {age} years.",
            "The {tame} {animal} {name} is {age} years old and {colour}.",
            "A {tame} {animal}, {colour} and {age} years old, is called {name}.",
        ),
    ),
    Frame(
        "house",
        (
            Field("street", "string", ("street", "road"), lambda rng: f"{rng.choice(v.LAST_NAMES)} Street"),
            Field("number", "integer", ("number", "house_number"), _between(1, 300)),
            Field("town", "string", ("town", "city"), _word(v.TOWNS)),
            Field("rooms", "integer", ("rooms", "room_count"), _between(2, 12)),
            Field("garden", "boolean", ("garden", "has_garden"), _coin, _either("with a garden", "without a garden")),
        ),
        (
            "The house at {number} {street} in {town} has {rooms} rooms and comes {garden}.",
            "In {town}, at {number} {street}, a house {garden} is for sale; it has {rooms} rooms.",
            "A house {garden}, {rooms} rooms in all, stands at {number} {street} in {town}.",
        ),
    ),
    Frame(
        "recipe",
        (
            Field("cook", "string", ("cook", "chef"), v.person),
            Field("foods", "list of strings", ("ingredients", "foods"), _some_foods, _listed),
            Field("minutes", "integer", ("minutes", "time"), _between(5, 180)),
            Field("portions", "integer", ("portions", "servings"), _between(1, 12)),
            Field("hot", "boolean", ("hot", "warm"), _coin, _either("hot", "cold")),
        ),
        (
            "{cook} needs {minutes} minutes to make {portions} portions from {foods}, served {hot}.",
            "From {foods} {cook} makes {portions} portions in {minutes} minutes and serves them {hot}.",
            "In {minutes} minutes {cook} prepares {portions} {hot} portions of {foods}.",
        ),
    ),
    Frame(
        "book",
        (
            Field(
                "title",
                "string",
                ("title", "book"),
                lambda rng: f"The {rng.choice(v.ADJECTIVES)} {rng.choice(v.OBJECTS)}",
            ),
            Field("author", "string", ("author", "writer"), v.person),
            Field("year", "integer", ("year", "published"), _between(1700, 2020)),
            Field("pages", "integer", ("pages", "page_count"), _between(40, 900)),
            Field("language", "string", ("language",), _word(v.LANGUAGES)),
        ),
        (
            "The book called {title} was written by {author} in {language}, has {pages} pages and appeared in {year}.",
            "In {year} {author} published {title}, a book of {pages} pages in {language}.",
            "{author} is the author of {title} from {year}, {pages} pages of {language}.",
        ),
    ),
)


def _object_form(fields: list[tuple[str, Field]]) -> str:
    return "{" + ", ".join(f'"{key}": {field.kind}' for key, field in fields) + "}"


def _prompt(rng: Random, sentence: str, fields: list[tuple[str, Field]]) -> str:
    """One of three ways to ask, each naming the keys in the order that the answer must have."""
    keys = ", ".join(key for key, _ in fields)
    return rng.choice(
        (
            f"{sentence}\nFill in this JSON object: {_object_form(fields)}",
            f"Write a JSON object with the keys {keys} for this sentence: {sentence}",
            f"Sentence: {sentence}\nJSON keys: {keys}",
        )
    )


def sample(rng: Random, split: Split, size: str) -> Item:
    """A sentence and the keys to fill; the frame with all its values decides the split."""

    def candidate() -> tuple[str, tuple[Frame, dict[str, Any]]]:
        frame = rng.choice(FRAMES)
        values = {field.slot: field.value(rng) for field in frame.fields}
        return f"json|{frame.name}|{json.dumps(values)}", (frame, values)

    key, (frame, values) = draw(split, candidate)
    words = {field.slot: field.spell(values[field.slot]) for field in frame.fields}
    sentence = rng.choice(frame.sentences).format(**words)
    fields = [(rng.choice(field.keys), field) for field in rng.sample(frame.fields, int(size))]
    expected = json.dumps({name: values[field.slot] for name, field in fields})
    prompt = _prompt(rng, sentence[0].upper() + sentence[1:], fields)
    return Item("json", size, (user(prompt),), expected, key, max_tokens=128)


def check(item: Item, text: str) -> Verdict:
    """Valid: the text is one JSON object. Right: it has the expected keys and values."""
    try:
        found = json.loads(text)
    except ValueError:
        return Verdict(valid=False, right=False)
    return Verdict(valid=isinstance(found, dict), right=bool(found == json.loads(item.expected)))


SKILL = Skill("json", SIZES, sample, check)
