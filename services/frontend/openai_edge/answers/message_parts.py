"""Reasoning, content and tool calls as OpenAI's messages and deltas have them.

Reasoning goes out under both names that clients look for: `reasoning` as vLLM has it, `reasoning_content` as DeepSeek.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from quire.services.frontend.output_processor.answer_parser import CallPiece, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.values.input_text import InputText

ARGUMENTS = {"function": "arguments", "custom": "input"}  # field of a call's object, by its type


class MessageText(NamedTuple):
    """A piece of a call whose argument is a text."""

    number: int
    id: str  # like the name: in a call's first piece only
    name: str
    input: str


class TextCalls:
    """One sample's calls of tools that take a text, with that in place of the JSON around it."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: of these tools."""
        self._names = names
        self._number = 0  # of the call that is open
        self._input: InputText | None = None

    def read(self, parts: Iterable[Part], *, ended: bool) -> list[Part | MessageText]:
        """`ended`: no more parts come."""
        found: list[Part | MessageText] = []
        for part in parts:
            if not isinstance(part, CallPiece) or part.id:
                found += self._end()
            if isinstance(part, CallPiece) and part.id and part.name in self._names:
                self._number, self._input = part.number, InputText()
            if isinstance(part, CallPiece) and self._input is not None:
                found.append(MessageText(part.number, part.id, part.name, self._input.push(part.arguments)))
            else:
                found.append(part)
        return found + (self._end() if ended else [])

    def _end(self) -> list[Part | MessageText]:
        open_input, self._input = self._input, None
        rest = open_input.finish() if open_input is not None else ""
        return [MessageText(self._number, "", "", rest)] if rest else []


def delta_of(parts: Iterable[Part | MessageText]) -> dict[str, Any]:
    """One delta for all of them: clients join each field on its own."""
    fields: dict[str, Any] = {}
    for part in parts:
        match part:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                fields["reasoning"] = fields["reasoning_content"] = fields.get("reasoning", "") + text
            case CallPiece() | MessageText():
                fields.setdefault("tool_calls", []).append(_piece(part))
    return fields


def _piece(piece: CallPiece | MessageText) -> dict[str, Any]:
    kind = "function" if isinstance(piece, CallPiece) else "custom"
    called = {ARGUMENTS[kind]: piece[-1]}
    if not piece.id:
        return {"index": piece.number, kind: called}
    return {"index": piece.number, "id": piece.id, "type": kind, kind: {"name": piece.name, **called}}


def message_of(parts: Iterable[Part | MessageText]) -> dict[str, Any]:
    """Of a whole answer. content is null where there are only calls or reasoning."""
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
    return any(isinstance(part, CallPiece) for part in parts)
