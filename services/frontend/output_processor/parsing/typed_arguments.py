"""Arguments of formats that write parameters one by one as plain text; the tool's schema says which are no strings."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from services.frontend.output_processor.parsing.json_text import quoted
from services.frontend.output_processor.parsing.scanner import WHITE, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.writer import EventWriter

STRING = frozenset({"string"})
PYTHONS_OWN = {"True": "true", "False": "false", "None": "null"}


class TypedArguments:
    """A JSON object that grows; after `key` comes `value`."""

    def __init__(self, scan: Scanner, writer: EventWriter) -> None:
        self._scan = scan
        self._writer = writer
        self._separator = "{"

    def key(self, name: str) -> None:
        self._writer.arguments(f'{self._separator}"{quoted(name)}": ')
        self._separator = ", "

    def value(self, types: frozenset[str], markers: Markers) -> Steps[str]:
        """Reads up to one of `markers` and returns it; nothing if the text ends before. Strings go out as they come."""
        if types == STRING:
            self._writer.arguments('"')
            found = yield from self._scan.until(markers, lambda text: self._writer.arguments(quoted(text)))
            if found:
                self._writer.arguments('"')
            return found
        parts: list[str] = []
        found = yield from self._scan.until(markers, parts.append)
        self._writer.arguments(as_json("".join(parts), types))
        return found

    def close(self) -> None:
        """What was read and is not settled becomes content behind the call, unless it is white space."""
        text = self._scan.unsettled
        self._writer.arguments("{}" if self._separator == "{" else "}")
        if text.strip(WHITE):
            self._writer.content(text)


def as_json(text: str, types: frozenset[str]) -> str:
    """The text itself if it is JSON of one of the types, else a string."""
    bare = text.strip(WHITE)
    bare = PYTHONS_OWN.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return f'"{quoted(text)}"'
    return bare if types & _types_of(value) else f'"{quoted(text)}"'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def _types_of(value: Any) -> frozenset[str]:
    if isinstance(value, bool) or value is None:
        return frozenset({"null" if value is None else "boolean"})
    if isinstance(value, int | float):
        return frozenset({"number", "integer"} if value == value // 1 else {"number"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})
