"""Reasoning, content and tool calls in the form of OpenAI's messages and deltas.

Reasoning is sent under both names that clients look for: `reasoning` as in vLLM, `reasoning_content` as in DeepSeek's
API.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.values.input_extractor import InputExtractor

ARGUMENTS = {"function": "arguments", "custom": "input"}  # argument field of a call's object, by its type


class TextInputDelta(NamedTuple):
    """New part of a call whose argument is a text."""

    number: int
    id: str  # only in a call's first delta, like the name
    name: str
    input: str


class TextInputCalls:
    """Reader of one sample's calls of text tools, which replaces the JSON around the text by the text."""

    def __init__(self, names: frozenset[str]) -> None:
        """Starts without an open call; `names` are the tools whose input is a text."""
        self._names = names
        self._number = 0  # number of the open call
        self._input: InputExtractor | None = None

    def convert(self, parts: Iterable[Part], *, ended: bool) -> list[Part | TextInputDelta]:
        """Replaces the JSON arguments of custom tools' calls by pieces of their text input; other parts pass
        unchanged. `ended` says that no parts follow, so that held input is returned."""
        converted: list[Part | TextInputDelta] = []
        for part in parts:
            if not isinstance(part, CallDelta) or part.id:
                converted += self._end()
            if isinstance(part, CallDelta) and part.id and part.name in self._names:
                self._number, self._input = part.number, InputExtractor()
            if isinstance(part, CallDelta) and self._input is not None:
                converted.append(TextInputDelta(part.number, part.id, part.name, self._input.push(part.arguments)))
            else:
                converted.append(part)
        return converted + (self._end() if ended else [])

    def _end(self) -> list[Part | TextInputDelta]:
        """Ends the open call and returns the rest of its text input, if there is more."""
        open_input, self._input = self._input, None
        rest = open_input.finish() if open_input is not None else ""
        return [TextInputDelta(self._number, "", "", rest)] if rest else []


def delta_of(parts: Iterable[Part | TextInputDelta]) -> dict[str, Any]:
    """Merges the parts into one delta: texts of a field are joined, calls are listed; {} without parts."""
    fields: dict[str, Any] = {}
    for part in parts:
        match part:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                fields["reasoning"] = fields["reasoning_content"] = fields.get("reasoning", "") + text
            case CallDelta() | TextInputDelta():
                fields.setdefault("tool_calls", []).append(_piece(part))
    return fields


def _piece(piece: CallDelta | TextInputDelta) -> dict[str, Any]:
    """Returns a delta of a tool call; its first piece, recognized by an id, carries id, type and name as well."""
    kind = "function" if isinstance(piece, CallDelta) else "custom"
    called = {ARGUMENTS[kind]: piece[-1]}
    if not piece.id:
        return {"index": piece.number, kind: called}
    return {"index": piece.number, "id": piece.id, "type": kind, kind: {"name": piece.name, **called}}


def message_of(parts: Iterable[Part | TextInputDelta]) -> dict[str, Any]:
    """Returns the message of a whole answer; content is null where there are only calls or reasoning."""
    delta = delta_of(parts)
    calls: list[dict[str, Any]] = []
    for piece in delta.pop("tool_calls", ()):
        piece.pop("index")
        if "id" in piece:
            calls.append(piece)
        else:
            ((kind, more),) = piece.items()
            calls[-1][kind][ARGUMENTS[kind]] += more[ARGUMENTS[kind]]
    has_more = bool(calls or delta.get("reasoning"))
    message: dict[str, Any] = {"content": delta.pop("content", None if has_more else ""), **delta}
    return {**message, "tool_calls": calls} if calls else message


def has_calls(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, CallDelta) for part in parts)
