"""Common types of all skills: items, verdicts, and the split that keeps some items out of training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from random import Random
from typing import Any, TypeVar

Message = dict[str, Any]
"""One chat message in OpenAI's form: role, content, and for an assistant's call `tool_calls`."""

Tool = dict[str, Any]
"""One tool in OpenAI's form: {"type": "function", "function": {"name", "description", "parameters"}}."""

HELD_BACK_ONE_IN = 10
"""One in this many keys is held back; a smaller share of two-digit sums would leave too few to score."""

T = TypeVar("T")


class Split(StrEnum):
    """Side of the training split from which an item is drawn."""

    TRAIN = "train"
    HELD_BACK = "held-back"


@dataclass(frozen=True, slots=True)
class Item:
    """One question with its known answer.

    `key` is the content that decides the split (a pair of summands, a fact): equal keys are always on the same side.
    `max_tokens` is enough for the expected answer and its end; a longer answer is a wrong one. `ends` is False where
    the answer is endless: then `max_tokens` ends it, and `expected` is longer than what it lets through.
    """

    skill: str
    size: str
    messages: tuple[Message, ...]
    expected: str
    key: str
    tools: tuple[Tool, ...] = ()
    max_tokens: int = 64
    ends: bool = True


@dataclass(frozen=True, slots=True)
class Verdict:
    """`valid`: the answer has the right form (JSON parses, a story is a story). `right`: it is the expected answer."""

    valid: bool
    right: bool


@dataclass(frozen=True, slots=True)
class Skill:
    """Functions of a skill module.

    `sample(rng, split, size)` draws one item; `sample_group(rng, split, size, count)` draws items that share as much
    of the prompt as the skill allows, which for recall is a whole document.
    """

    name: str
    sizes: tuple[str, ...]
    sample: Callable[[Random, Split, str], Item]
    check: Callable[[Item, str], Verdict]
    sample_group: Callable[[Random, Split, str, int], list[Item]] | None = None


def is_held_back(key: str) -> bool:
    """Whether items with this key never occur in training: a function of the key alone, the same on every machine."""
    digest = blake2b(key.encode(), digest_size=8, person=b"quire-tiny").digest()
    return int.from_bytes(digest, "big") % HELD_BACK_ONE_IN == 0


def split_of(key: str) -> Split:
    """The side of the split that this key belongs to."""
    return Split.HELD_BACK if is_held_back(key) else Split.TRAIN


def draw(split: Split, candidate: Callable[[], tuple[str, T]]) -> tuple[str, T]:
    """Call `candidate`, which returns (key, value), until the key is on the wanted side; return both."""
    while True:
        key, value = candidate()
        if split_of(key) is split:
            return key, value


def user(content: str) -> Message:
    """Returns a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> Message:
    """Returns a message of the assistant."""
    return {"role": "assistant", "content": content}


def exact(item: Item, text: str) -> Verdict:
    """The checker of skills whose answer has one canonical spelling."""
    right = text.strip() == item.expected
    return Verdict(valid=right, right=right)
