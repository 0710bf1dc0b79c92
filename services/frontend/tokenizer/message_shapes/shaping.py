"""Conversion of messages from the edges' form to the shape that a template reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from quire.services.frontend.tokenizer.message_shapes import calls, instructions, media_parts
from quire.services.frontend.tokenizer.message_shapes.contents import (
    REASONING_FIELDS,
    joined,
    reasoning_of,
    with_content,
)
from quire.services.frontend.tokenizer.message_shapes.shape import MessageShape

Message = Mapping[str, Any]
ANSWER = "OK."


def shape_messages(messages: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Returns new messages in the shape that the template reads: instructions, calls, reasoning, content, then
    merged turns. The given ones are not modified."""
    turns = media_parts.apply_shape(instructions.apply_shape(messages, shape), shape)
    turns = calls.apply_shape(turns, shape)
    if shape.after_results == "answered":
        turns = _answered(turns)
    turns = [_with_reasoning(turn, shape) for turn in turns]
    turns = [with_content(turn, shape) for turn in turns]
    return _merged(turns, shape)


def tools_for_template(tools: Sequence[Mapping[str, Any]], shape: MessageShape) -> list[Mapping[str, Any]] | None:
    """Returns the tools of a request as the template reads them."""
    return list(tools) if tools or shape.tools == "list" else None


def _with_reasoning(turn: Message, shape: MessageShape) -> Message:
    """Returns the turn with its reasoning under all names that templates use, or as a first content part of type
    thinking."""
    reasoning = reasoning_of(turn)
    if not reasoning:
        return turn
    rest = {name: value for name, value in turn.items() if name not in REASONING_FIELDS}
    if shape.reasoning == "fields":
        return {**rest, **dict.fromkeys(REASONING_FIELDS, reasoning)}
    content = rest.get("content") or []
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
    return {**rest, "content": [{"type": "thinking", "thinking": reasoning}, *parts]}


def _answered(turns: Sequence[Message]) -> list[Message]:
    """Inserts an answer between a tool's result and a user turn, where the template refuses that sequence."""
    written: list[Message] = []
    for turn in turns:
        if turn["role"] == "user" and written and written[-1]["role"] == "tool":
            written.append({"role": "assistant", "content": ANSWER})
        written.append(turn)
    return written


def _merged(turns: Sequence[Message], shape: MessageShape) -> list[Message]:
    """Merges consecutive turns of one role where the template requires alternating roles; turns with tool calls stay
    separate."""
    roles = {role for role in ("user", "assistant") if getattr(shape, f"{role}_turns") == "merged"}
    if not roles:
        return list(turns)
    merged: list[Message] = []
    for turn in turns:
        last = merged[-1] if merged else None
        calls = "tool_calls" in turn or (last is not None and "tool_calls" in last)
        if last is not None and turn["role"] == last["role"] in roles and not calls:
            merged[-1] = {**last, **turn, "content": joined(last.get("content"), turn.get("content"))}
        else:
            merged.append(turn)
    return merged
