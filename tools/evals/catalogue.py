"""The tools offered in prompts: names, parameters, requests and results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from tools.evals import vocabulary as v


@dataclass(frozen=True, slots=True)
class Param:
    """A parameter: the names it may go by, its JSON type, and how a request's value for it is drawn."""

    slot: str
    names: tuple[str, ...]
    kind: str
    about: str
    value: Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class ToolKind:
    """A tool before one of its names is chosen. Requests hold `{slot}` for the arguments they give.

    `reply` words the tool's result for the user; it may hold a slot or a field of `result`.
    """

    names: tuple[str, ...]
    about: str
    params: tuple[Param, ...]
    requests: tuple[str, ...]
    result: dict[str, Callable[[Random], Any]]
    reply: str


def _word(words: tuple[str, ...]) -> Callable[[Random], str]:
    return lambda rng: rng.choice(words)


def _between(low: int, high: int) -> Callable[[Random], int]:
    return lambda rng: rng.randint(low, high)


def _reference(rng: Random) -> str:
    return f"{rng.choice('ABCDEFGH')}{v.digits(rng, 4)}"


def _message(rng: Random) -> str:
    return f"the {rng.choice(v.ADJECTIVES)} {rng.choice(v.OBJECTS)} is ready"


_TOWN = Param("town", ("city", "town", "location"), "string", "The town.", _word(v.TOWNS))
_PERSON = Param("person", ("name", "person", "contact"), "string", "Full name of the person.", v.person)
_DAY = Param("day", ("day", "weekday"), "string", "Day of the week.", _word(v.WEEKDAYS))
_TIME = Param("time", ("time", "at"), "string", "Time of day, HH:MM.", v.clock)
_COUNT = Param("count", ("count", "number", "quantity"), "integer", "How many.", _between(2, 99))
_FOOD = Param("food", ("item", "product"), "string", "The goods.", _word(v.FOODS))
_MINUTES = Param("minutes", ("minutes", "duration"), "integer", "Length in minutes.", _between(1, 240))
_COLOUR = Param("colour", ("colour", "color"), "string", "The colour.", _word(v.COLOURS))
_PLACE = Param("place", ("room", "place"), "string", "The room.", _word(v.PLACES))
_AMOUNT = Param("amount", ("amount", "sum"), "integer", "Amount in crowns.", _between(1, 999))
_TEXT = Param("text", ("text", "message"), "string", "What to say.", _message)
_LANGUAGE = Param("language", ("language", "target"), "string", "The language.", _word(v.LANGUAGES))
_BOOK = Param(
    "book",
    ("title", "book"),
    "string",
    "The title.",
    lambda rng: f"The {rng.choice(v.ADJECTIVES).title()} {rng.choice(v.OBJECTS).title()}",
)
_LEVEL = Param("level", ("level", "percent"), "integer", "From 0 to 100.", _between(0, 100))
_ORDER = Param("order", ("order_id", "order"), "string", "The order's reference.", _reference)
_WORD = Param("word", ("word", "term"), "string", "The word.", _word(v.LIST_WORDS))
_GOAL = Param("goal", ("destination", "to"), "string", "Where to go.", v.invented)

TOOL_KINDS: tuple[ToolKind, ...] = (
    ToolKind(
        ("get_weather", "weather_report"),
        "Tell the weather in a town.",
        (_TOWN, _DAY),
        ("What is the weather in {town}?", "How is the weather in {town} on {day}?", "Will {town} have sun on {day}?"),
        {"degrees": _between(-9, 35), "sky": _word(("clear", "cloudy", "rainy", "sunny", "foggy"))},
        "It is {sky} with {degrees} degrees in {town}.",
    ),
    ToolKind(
        ("find_phone", "lookup_number"),
        "Find the phone number of a person.",
        (_PERSON,),
        ("What is the number of {person}?", "Find the phone number of {person}.", "I want to call {person}."),
        {"phone": lambda rng: f"{v.digits(rng, 3)}-{v.digits(rng, 4)}"},
        "The number of {person} is {phone}.",
    ),
    ToolKind(
        ("set_alarm", "wake_up"),
        "Set an alarm.",
        (_TIME, _DAY),
        ("Wake me at {time}.", "Set an alarm for {time} on {day}.", "I must get up at {time} on {day}."),
        {"status": _word(("set",))},
        "The alarm is set for {time}.",
    ),
    ToolKind(
        ("start_timer", "set_timer"),
        "Start a timer.",
        (_MINUTES,),
        (
            "Start a timer for {minutes} minutes.",
            "Tell me when {minutes} minutes are over.",
            "Timer: {minutes} minutes.",
        ),
        {"status": _word(("running",))},
        "The timer runs for {minutes} minutes.",
    ),
    ToolKind(
        ("order_goods", "place_order"),
        "Order goods from the shop.",
        (_FOOD, _COUNT),
        ("Order {count} boxes of {food}.", "I need {count} boxes of {food}.", "Please buy {food}, {count} boxes."),
        {"order_id": _reference, "price": _between(5, 900)},
        "Order {order_id} costs {price} crowns.",
    ),
    ToolKind(
        ("order_status", "track_order"),
        "Say where an order is.",
        (_ORDER,),
        ("Where is my order {order}?", "Has order {order} been sent?", "Track order {order}."),
        {"status": _word(("packed", "sent", "delivered", "delayed"))},
        "Order {order} is {status}.",
    ),
    ToolKind(
        ("book_table", "reserve_table"),
        "Reserve a table for dinner.",
        (_COUNT, _DAY, _TIME),
        ("Book a table for {count} on {day} at {time}.", "A table for {count} people at {time} on {day}, please."),
        {"table": _between(1, 60)},
        "Table {table} is yours on {day} at {time}.",
    ),
    ToolKind(
        ("send_message", "write_to"),
        "Send a message to a person.",
        (_PERSON, _TEXT),
        ("Tell {person} that {text}.", "Write to {person} that {text}.", "Send {person} a message: {text}."),
        {"status": _word(("sent",))},
        "I have told {person} that {text}.",
    ),
    ToolKind(
        ("transfer_money", "pay_person"),
        "Send money to a person.",
        (_PERSON, _AMOUNT),
        ("Send {amount} crowns to {person}.", "Pay {person} {amount} crowns.", "I owe {person} {amount} crowns."),
        {"reference": _reference},
        "{person} gets {amount} crowns, reference {reference}.",
    ),
    ToolKind(
        ("switch_light", "set_light"),
        "Change the light in a room.",
        (_PLACE, _COLOUR),
        (
            "Make the light in the {place} {colour}.",
            "I want {colour} light in the {place}.",
            "Turn the {place} {colour}.",
        ),
        {"status": _word(("done",))},
        "The light in the {place} is {colour} now.",
    ),
    ToolKind(
        ("set_heating", "heat_room"),
        "Set the heating of a room.",
        (_PLACE, _LEVEL),
        ("Heat the {place} to {level} percent.", "Set the heating in the {place} to {level} percent."),
        {"status": _word(("done",))},
        "The heating in the {place} is at {level} percent.",
    ),
    ToolKind(
        ("plan_route", "find_route"),
        "Find the way from one town to another.",
        (_TOWN, _GOAL),
        (
            "How do I get from {town} to {goal}?",
            "Show me the way from {town} to {goal}.",
            "Drive from {town} to {goal}.",
        ),
        {"minutes": _between(10, 300)},
        "It takes {minutes} minutes from {town} to {goal}.",
    ),
    ToolKind(
        ("translate_word", "translate"),
        "Translate a word.",
        (_WORD, _LANGUAGE),
        ("What is {word} in {language}?", "Translate {word} to {language}.", "How do you say {word} in {language}?"),
        {"translation": v.invented},
        "In {language} it is {translation}.",
    ),
    ToolKind(
        ("find_book", "search_library"),
        "Look for a book in the library.",
        (_BOOK,),
        ("Do you have the book {book}?", "I am looking for the book {book}.", "Find the book {book}."),
        {"shelf": _between(1, 200)},
        "{book} stands on shelf {shelf}.",
    ),
    ToolKind(
        ("make_appointment", "schedule_visit"),
        "Agree on a time to see a person.",
        (_PERSON, _DAY, _TIME),
        ("I want to see {person} on {day} at {time}.", "Arrange a meeting with {person} at {time} on {day}."),
        {"room": _between(1, 99)},
        "You will see {person} on {day} at {time} in room {room}.",
    ),
    ToolKind(
        ("play_music", "start_music"),
        "Play music in a room.",
        (_PLACE, _LEVEL),
        (
            "Play music in the {place}.",
            "Play music in the {place} at volume {level}.",
            "Music in the {place}, volume {level}.",
        ),
        {"song": _message},
        "Now playing in the {place}: {song}.",
    ),
)
