"""Conversations of several turns: other skills one after another, and things said earlier."""

from __future__ import annotations

from random import Random

from tools.evals import arithmetic, counting, echo, json_object, lists, small_talk
from tools.evals import vocabulary as v
from tools.evals.item import Item, Message, Skill, Split, assistant, draw, exact, user

SIZES = ("2", "3", "4", "6", "name")
"""How many questions are asked in all; `name` asks at the end for the name that the user gave at the start."""

ASK_NAME = ("What is my name?", "Do you remember my name?", "Who am I?", "What am I called?")

# Skills whose question and answer are short; each with the sizes that are.
TURNS: tuple[tuple[Skill, tuple[str, ...]], ...] = (
    (arithmetic.SKILL, arithmetic.SIZES),
    (lists.SKILL, tuple(size for size in lists.SIZES if not size.endswith("long"))),
    (json_object.SKILL, json_object.SIZES),
    (echo.SKILL, echo.SIZES),
    (counting.SKILL, ("short",)),
    (small_talk.SKILL, small_talk.SIZES),
)


def _turn(rng: Random, split: Split) -> Item:
    skill, sizes = rng.choice(TURNS)
    return skill.sample(rng, split, rng.choice(sizes))


def _earlier(rng: Random, count: int) -> list[Message]:
    """Draws `count` questions with their answers as earlier turns, always from the training split."""
    messages: list[Message] = []
    for _ in range(count):
        turn = _turn(rng, Split.TRAIN)
        messages += [*turn.messages, assistant(turn.expected)]
    return messages


def _remember_name(rng: Random, split: Split) -> Item:
    """Samples a conversation in which the user says a name first and asks for it after up to three other turns."""

    def candidate() -> tuple[str, tuple[str, str]]:
        name = v.first_name(rng) if rng.random() < 0.5 else v.invented(rng)
        said = rng.choice(small_talk.INTRODUCTIONS).format(name=name)
        return f"talk|{said}", (name, said)

    key, (name, said) = draw(split, candidate)
    messages = [user(said), assistant(f"Nice to meet you, {name}!"), *_earlier(rng, rng.randint(0, 3))]
    messages.append(user(rng.choice(ASK_NAME)))
    return Item("conversation", "name", tuple(messages), f"Your name is {name}.", key)


def sample(rng: Random, split: Split, size: str) -> Item:
    """A conversation whose last question is on the wanted side of the split, after others from training."""
    if size == "name":
        return _remember_name(rng, split)
    last = _turn(rng, split)
    messages = (*_earlier(rng, int(size) - 1), *last.messages)
    return Item("conversation", size, messages, last.expected, last.key, max_tokens=max(128, last.max_tokens))


SKILL = Skill("conversation", SIZES, sample, exact)
