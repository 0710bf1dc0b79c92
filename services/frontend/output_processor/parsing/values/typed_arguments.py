"""Arguments in formats that write parameters separately as plain text; the tool's schema gives their types."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NoReturn

from quire.services.frontend.output_processor.parsing.scanner import WHITE, Malformed, Markers, Scanner, Sink, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import json_repair
from quire.services.frontend.output_processor.parsing.values.json_text import quoted
from quire.services.frontend.output_processor.parsing.writer import EventWriter

STRING = frozenset({"string"})
PYTHON_LITERALS = {"True": "true", "False": "false", "None": "null"}
WRAPPERS = ("arguments", "parameters")  # a parameter of this name, unknown to the tool, may hold all arguments

EndsHere = Callable[[str], Steps[bool]]
"""Returns whether a marker ends the value before it or is part of it; reads ahead and commits nothing."""


class TypedArguments:
    """Arguments of a call of `function`, extended by `parameter`."""

    def __init__(self, scan: Scanner, writer: EventWriter, schemas: ToolSchemas, function: str) -> None:
        self._scan = scan
        self._out = writer.start_call(function)
        self._schemas = schemas
        self._function = function
        self.names: set[str] = set()

    def body(self) -> Steps[None]:
        """Reads all arguments as one JSON object."""
        yield from json_repair.value(self._scan, self._out)

    def parameter(
        self, name: str, types: frozenset[str] | None, markers: Markers, ends_here: EndsHere | None = None
    ) -> Steps[str]:
        """Reads a value up to one of `markers` and returns the marker; raises Malformed if the text ends before.

        Strings are emitted as they arrive. `types`: None for those of the schema; `ends_here`: None where every marker
        ends the value.
        """
        if self._is_wrapper(name) and (yield from self._scan.next_is("{")):
            return (yield from self._wrapped(markers, ends_here))
        self._begin(name)
        types = types or self._schemas.types(self._function, name)
        if types == STRING:
            marker = yield from self._text(markers, ends_here, lambda text: self._out.string_part(quoted(text)))
            self._out.end_string()
            return marker
        parts: list[str] = []
        marker = yield from self._text(markers, ends_here, parts.append)
        self._out.scalar(as_json("".join(parts), types))
        return marker

    def add(self, name: str, value: str) -> None:
        """Writes a value that is already JSON."""
        self._begin(name)
        self._out.scalar(value)

    def _begin(self, name: str) -> None:
        """Opens the object before the first parameter and writes the parameter's key."""
        if not self.names:
            self._out.open("{")
        self.names.add(name)
        self._out.key(quoted(name))

    def may_begin(self, name: str) -> bool:
        """Returns whether the tool has a parameter of this name that has not been written yet."""
        return self._schemas.declares(self._function, name) and name not in self.names

    def end(self) -> None:
        if self._out.depth:
            self._out.end()

    def _is_wrapper(self, name: str) -> bool:
        is_known = self._function in self._schemas and not self._schemas.declares(self._function, name)
        return name in WRAPPERS and is_known and not self.names and not self._out.has_begun

    def _wrapped(self, markers: Markers, ends_here: EndsHere | None) -> Steps[str]:
        """Reads text up to a marker as one JSON value and returns the marker; raises Malformed if the JSON is
        incomplete."""
        pushed = json_repair.IncrementalJson(self._out)
        marker = yield from self._text(markers, ends_here, pushed.push)
        pushed.end()
        if not pushed.is_complete:
            raise Malformed
        return marker

    def _text(self, markers: Markers, ends_here: EndsHere | None, sink: Sink) -> Steps[str]:
        """Sends text to the sink up to a marker that really ends the value, as `ends_here` decides, and returns the
        marker. Raises Malformed without one."""
        while marker := (yield from self._scan.read_until(markers, sink)):
            begin = self._scan.at
            is_end = ends_here is None or (yield from ends_here(marker))
            self._scan.at = begin
            if is_end:
                return marker
            sink(self._scan.marker)
        raise Malformed


def as_json(text: str, types: frozenset[str]) -> str:
    """Returns the text itself if it is JSON of one of the types, or can be repaired to it, else a JSON string."""
    bare = text.strip(WHITE)
    bare = PYTHON_LITERALS.get(bare, bare)
    try:
        value = json.loads(bare, parse_constant=_refuse)
    except (ValueError, RecursionError):
        kind = {"{": "object", "[": "array"}.get(bare[:1], "")
        return (kind in types and json_repair.repaired(bare)) or f'"{quoted(text)}"'
    return bare if types & _types_of(value) else f'"{quoted(text)}"'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _types_of(value: Any) -> frozenset[str]:
    """Returns the JSON Schema types that a parsed value has; a whole number is an integer and a number."""
    if isinstance(value, bool) or value is None:
        return frozenset({"null" if value is None else "boolean"})
    if isinstance(value, int | float):
        return frozenset({"number", "integer"} if value == value // 1 else {"number"})
    return frozenset({"string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"})
