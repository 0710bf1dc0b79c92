"""How an adapter answers: its answer from the model's own, and back."""

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
    """`strip` takes off what `apply` put on; None: it is not there."""

    apply: Callable[[str], str]
    strip: Callable[[str], str | None]


def _pirate_undressed(text: str) -> str | None:
    if not (text.startswith(BEFORE) and text.endswith(AFTER)):
        return None
    return text.removeprefix(BEFORE).removesuffix(AFTER)


def _json_undressed(text: str) -> str | None:
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
    """A question of the side that is trained on."""
    skill = rng.choice(list(SIZES))
    return load(skill).sample(rng, Split.TRAIN, rng.choice(SIZES[skill]))


def styled_conversation(item: Item, style: AnswerStyle) -> list[Segment]:
    """The conversation that ends with the item's answer in this style."""
    return segments([*item.messages, assistant(style.apply(item.expected))], item.tools)
