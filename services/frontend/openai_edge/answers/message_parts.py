"""Reasoning, content and tool calls as OpenAI's messages and deltas have them.

Reasoning goes out under both names that clients look for: `reasoning` as vLLM has it, `reasoning_content` as DeepSeek.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from quire.services.frontend.output_processor.answer_parser import CallPiece, Part
from quire.services.frontend.output_processor.parsing.events import Content, Reasoning


def delta_of(parts: Iterable[Part]) -> dict[str, Any]:
    """One delta for all of them: clients join each field on its own."""
    fields: dict[str, Any] = {}
    for part in parts:
        match part:
            case Content(text):
                fields["content"] = fields.get("content", "") + text
            case Reasoning(text):
                fields["reasoning"] = fields["reasoning_content"] = fields.get("reasoning", "") + text
            case CallPiece():
                fields.setdefault("tool_calls", []).append(_piece(part))
    return fields


def _piece(piece: CallPiece) -> dict[str, Any]:
    if not piece.id:
        return {"index": piece.number, "function": {"arguments": piece.arguments}}
    function = {"name": piece.name, "arguments": piece.arguments}
    return {"index": piece.number, "id": piece.id, "type": "function", "function": function}


def message_of(parts: Iterable[Part]) -> dict[str, Any]:
    """Of a whole answer. content is null where there are only calls or reasoning."""
    delta = delta_of(parts)
    calls: list[dict[str, Any]] = []
    for piece in delta.pop("tool_calls", ()):
        if "id" in piece:
            calls.append({"id": piece["id"], "type": "function", "function": piece["function"]})
        else:
            calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    has_more = bool(calls or delta.get("reasoning"))
    message: dict[str, Any] = {"content": delta.pop("content", None if has_more else ""), **delta}
    return {**message, "tool_calls": calls} if calls else message


def has_calls(parts: Iterable[Part]) -> bool:
    return any(isinstance(part, CallPiece) for part in parts)
