"""Reasoning, content and tool calls as OpenAI's messages and deltas have them.

Reasoning goes out under both names that clients look for: `reasoning` as vLLM has it, `reasoning_content` as DeepSeek.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from quire.services.frontend.output_processor.answer_parser import CallDelta, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning
from quire.services.frontend.output_processor.parsing.values.input_extractor import InputExtractor

ARGUMENTS = {"function": "arguments", "custom": "input"}  # field of a call's object, by its type


class TextInputDelta(NamedTuple):
    """A piece of a call whose argument is a text."""

    number: int
    id: str  # like the name: in a call's first piece only
    name: str
    input: str


class TextInputCalls:
    """One sample's calls of tools that take a text, with that in place of the JSON around it."""

    def __init__(self, names: frozenset[str]) -> None:
        """`names`: of these tools."""
        self._names = names
        self._number = 0  # of the call that is open
        self._input: InputExtractor | None = None

    def read(self, parts: Iterable[Part], *, ended: bool) -> list[Part | TextInputDelta]:
        """`ended`: no more parts come."""
        found: list[Part | TextInputDelta] = []
        for part in parts:
            if not isinstance(part, CallDelta) or part.id:
                found += self._end()
            if isinstance(part, CallDelta) and part.id and part.name in self._names:
                self._number, self._input = part.number, InputExtractor()
            if isinstance(part, CallDelta) and self._input is not None:
                found.append(TextInputDelta(part.number, part.id, part.name, self._input.push(part.arguments)))
            else:
                found.append(part)
        return found + (self._end() if ended else [])

    def _end(self) -> list[Part | TextInputDelta]:
        open_input, self._input = self._input, None
        rest = open_input.finish() if open_input is not None else ""
        return [TextInputDelta(self._number, "", "", rest)] if rest else []


def delta_of(parts: Iterable[Part | TextInputDelta]) -> dict[str, Any]:
    """One delta for all of them: clients join each field on its own."""
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
    kind = "function" if isinstance(piece, CallDelta) else "custom"
    called = {ARGUMENTS[kind]: piece[-1]}
    if not piece.id:
        return {"index": piece.number, kind: called}
    return {"index": piece.number, "id": piece.id, "type": kind, kind: {"name": piece.name, **called}}


def message_of(parts: Iterable[Part | TextInputDelta]) -> dict[str, Any]:
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
    return any(isinstance(part, CallDelta) for part in parts)
