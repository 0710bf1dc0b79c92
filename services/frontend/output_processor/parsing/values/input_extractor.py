"""Extraction of a call's only text argument from the JSON that models write around it."""

from __future__ import annotations

import json

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.values import json_repair, json_text
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.request.tool_offer import INPUT

LONGEST_KEY = 64


class InputExtractor:
    """Incremental extractor: `push` the arguments in pieces, `finish` once. The returned texts add up to the input."""

    __slots__ = ("_found", "_parts", "_scan", "_steps", "_whole")

    def __init__(self) -> None:
        self._scan = Scanner()
        self._steps = self._read()
        self._parts: list[str] = []
        self._whole: list[str] = []  # all arguments so far, until the input is found
        self._found = False

    def push(self, arguments: str) -> str:
        """Returns the decoded characters of the text argument that the piece of JSON adds, "" until it is found."""
        self._scan.feed(arguments)
        if not self._found:
            self._whole.append(arguments)
        next(self._steps, None)
        if self._found:
            self._scan.commit()
        return self._take()

    def finish(self) -> str:
        """Returns the rest: the only text of arguments under another name, or else the arguments unchanged."""
        self._scan.end()
        next(self._steps, None)
        return self._take() if self._found else _only_text("".join(self._whole))

    def _take(self) -> str:
        parts, self._parts = self._parts, []
        return "".join(parts)

    def _read(self) -> Steps[None]:
        """Reads the object until the text argument ends; malformed JSON ends the reading without an error."""
        try:
            yield from self._scan.expect("{")
            more = True
            while more:
                yield from self._member()
                if self._found:
                    return
                yield from self._scan.skip_space()
                more = (yield from self._scan.expect(",", "}")) == ","
        except Malformed:
            pass

    def _member(self) -> Steps[None]:
        """Reads one member: the text argument to the sink, other values to nothing."""
        yield from self._scan.skip_space()
        key = yield from json_text.short_string(self._scan, LONGEST_KEY)
        yield from self._scan.skip_space()
        yield from self._scan.expect(":")
        yield from self._scan.skip_space()
        if key == INPUT and (yield from self._scan.next_is('"')):
            self._found, self._whole = True, []
            yield from json_text.string(self._scan, self._parts_sink)
        else:
            yield from json_repair.value(self._scan, ArgumentsWriter(lambda _part: None))

    def _parts_sink(self, part: str) -> None:
        self._parts.append(part)


def _only_text(arguments: str) -> str:
    """Returns the object's only value if it is a text, "" if there is no value, and otherwise the JSON as it stands."""
    try:
        parsed = json.loads(arguments or "{}")
    except ValueError:
        return arguments
    values = list(parsed.values()) if isinstance(parsed, dict) else [parsed]
    if len(values) == 1 and isinstance(values[0], str):
        return values[0]
    return arguments if values else ""
