"""System and developer turns in the positions and roles that a template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.tokenizer.message_shapes.contents import joined
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape

Message = Mapping[str, Any]
ROLES = ("system", "developer")


def apply_shape(messages: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Returns the messages with system and developer turns as the template reads them."""
    roles = [message["role"] for message in messages]
    if not {*ROLES} & {*roles}:
        return list(messages)
    alone = shape.developer == "alone" and roles[0] == "developer" and "system" not in roles
    turns = list(messages) if shape.developer == "kept" else _as_system(messages)
    turns = _moved(turns, shape)
    if alone and turns[0]["role"] == "system":
        turns[0] = {**turns[0], "role": "developer"}
    return turns


def _as_system(messages: Sequence[Message]) -> list[Message]:
    """Turns developer turns into system turns; one that follows a system turn is merged with it."""
    turns: list[Message] = []
    for message in messages:
        if message["role"] != "developer":
            turns.append(message)
        elif turns and turns[-1]["role"] == "system":
            turns[-1] = _extended(turns[-1], message)
        else:
            turns.append({**message, "role": "system"})
    return turns


def _moved(turns: list[Message], shape: MessageShape) -> list[Message]:
    """Moves system turns to positions that the template reads: unchanged, joined to the leading ones, or put into
    the user's first turn."""
    if shape.system_turns == "kept":
        return turns
    leading = next((place for place, turn in enumerate(turns) if turn["role"] not in ROLES), len(turns))
    first = turns[:leading] if shape.system_turns == "early" else turns[:1] if leading else []
    late = [turn for turn in turns[len(first) :] if turn["role"] in ROLES]
    others = [turn for turn in turns[leading:] if turn["role"] not in ROLES]
    for turn in late:
        first[-1:] = [_extended(first[-1], turn) if first else {**turn, "role": "system"}]
    return first + others if shape.system_turns != "user" else _in_user_turn(first, others)


def _in_user_turn(instructions: Sequence[Message], others: list[Message]) -> list[Message]:
    """Puts the instructions' text before the first user turn's text; without a user turn it becomes one."""
    content = instructions[0].get("content") if instructions else None
    place = next((place for place, turn in enumerate(others) if turn["role"] == "user"), None)
    if not content:
        return others
    if place is None:
        return [{"role": "user", "content": content}, *others]
    user = others[place]
    return [*others[:place], {**user, "content": joined(content, user.get("content"))}, *others[place + 1 :]]


def _extended(turn: Message, by: Message) -> Message:
    return {**turn, "content": joined(turn.get("content"), by.get("content"))}
