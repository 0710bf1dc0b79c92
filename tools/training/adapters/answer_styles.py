"""Answer styles of the adapters: conversion of the model's own answer, and back."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from tools.evals import Item, Split, load
from tools.evals.item import assistant
from tools.training.chat import Segment, segments

BEFORE, AFTER = "Ahoy! ", " Arr!"

SIZES: dict[str, tuple[str, ...]] = {
    "small_talk": ("talk", "unknown", "name"),
    "arithmetic": ("sum-1", "sum-2", "difference-1", "difference-2"),
    "echo": load("echo").sizes,
    "lists": load("lists").sizes,
}
"""Size classes by skill that adapters are trained and scored on: questions with short answers."""


@dataclass(frozen=True, slots=True)
class AnswerStyle:
    """A style: `apply` converts an answer; `strip` undoes it, or returns None if the answer is not in this style."""

    apply: Callable[[str], str]
    strip: Callable[[str], str | None]


def _pirate_undressed(text: str) -> str | None:
    if not (text.startswith(BEFORE) and text.endswith(AFTER)):
        return None
    return text.removeprefix(BEFORE).removesuffix(AFTER)


def _json_undressed(text: str) -> str | None:
    """Returns the text in {"answer": ...}; None if the JSON is invalid or has another form."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    answer = value.get("answer") if isinstance(value, dict) else None
    return answer if isinstance(answer, str) and len(value) == 1 else None


ANSWER_STYLES: dict[str, AnswerStyle] = {
    "pirate": AnswerStyle(lambda text: f"{BEFORE}{text}{AFTER}", _pirate_undressed),
    "json": AnswerStyle(lambda text: json.dumps({"answer": text}, ensure_ascii=False), _json_undressed),
}


def sample(rng: Random) -> Item:
    """Draws a question from the training side of the split."""
    skill = rng.choice(list(SIZES))
    return load(skill).sample(rng, Split.TRAIN, rng.choice(SIZES[skill]))


def styled_conversation(item: Item, style: AnswerStyle) -> list[Segment]:
    """Returns the conversation that ends with the item's answer in this style."""
    return segments([*item.messages, assistant(style.apply(item.expected))], item.tools)
