"""Calls written as JSON objects that hold a name and arguments, one or several, in an array or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from services.frontend.output_processor.parsing import json_text
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Sink, Steps
from services.frontend.output_processor.parsing.writer import EventWriter

LONGEST_NAME = 256  # characters
LONGEST_KEY = 64

IsName = Callable[[str], bool]


def any_name(name: str) -> bool:
    return bool(name)


@dataclass(frozen=True, slots=True)
class Keys:
    """What a format calls the members of a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str = "id"
    others: tuple[str, ...] | None = None  # members that a call may have besides; None: any

    def allow(self, key: str) -> bool:
        return self.others is None or key in (self.name, *self.arguments, self.id, *self.others)


class _Call:
    """One object on its way. It is a call once its name is known and its arguments begin, or it ends."""

    def __init__(self, scan: Scanner, writer: EventWriter, keys: Keys, is_name: IsName) -> None:
        self._scan = scan
        self._writer = writer
        self._keys = keys
        self._is_name = is_name
        self._name = ""
        self._id = ""
        self._early: list[str] = []  # arguments that came before the name
        self._started = False

    def read(self) -> Steps[None]:
        yield from self._scan.expect("{")
        yield from self._scan.skip_space()
        if not (yield from self._scan.try_text("}")):
            yield from self._members()
        self._start()
        self._scan.settle()

    def _members(self) -> Steps[None]:
        more = True
        while more:
            key = yield from json_text.short_string(self._scan, LONGEST_KEY)
            yield from self._scan.skip_space()
            yield from self._scan.expect(":")
            yield from self._scan.skip_space()
            yield from self._member(key)
            yield from self._scan.skip_space()
            more = (yield from self._scan.expect(",", "}")) == ","
            yield from self._scan.skip_space()

    def _member(self, key: str) -> Steps[None]:
        if not self._keys.allow(key):
            raise Malformed
        if key == self._keys.name and not self._name:
            self._name = yield from json_text.short_string(self._scan, LONGEST_NAME)
            if not self._is_name(self._name):
                raise Malformed
        elif key in self._keys.arguments and not self._started and not self._early:
            yield from self._arguments()
        elif key == self._keys.id and (yield from self._scan.peek()) == '"':
            self._id = yield from json_text.short_string(self._scan, LONGEST_NAME)
        else:
            yield from json_text.value(self._scan, _nowhere)

    def _arguments(self) -> Steps[None]:
        """An object as it is written; also one that was written into a string, and null for none."""
        first = yield from self._scan.peek()
        if first and first in '{"' and self._name:
            self._start()
        sink: Sink = self._writer.arguments if self._started else self._early.append
        if first == "{":
            yield from json_text.value(self._scan, sink)
        elif first == '"':
            yield from json_text.string(self._scan, sink)
        else:
            yield from self._scan.expect("null")

    def _start(self) -> None:
        if not self._name:
            raise Malformed
        if not self._started:
            self._started = True
            self._writer.start(self._name, self._id)
            for part in self._early:
                self._writer.arguments(part)


def _nowhere(_part: str) -> None:
    """Of members that say nothing about the call."""


def calls(
    scan: Scanner, writer: EventWriter, keys: Keys, is_name: IsName = any_name, between: str = ","
) -> Steps[None]:
    """One object, several with `between` or white space between them, or an array of them."""
    yield from scan.skip_space()
    in_array = yield from scan.try_text("[")
    yield from scan.skip_space()
    while True:
        yield from _Call(scan, writer, keys, is_name).read()
        yield from scan.skip_space()
        if (yield from scan.peek()) == "{":
            continue
        if not (yield from scan.try_text("," if in_array else between)):
            break
        yield from scan.skip_space()
    if in_array:
        yield from scan.expect("]")
        scan.settle()


def blocks(scan: Scanner, writer: EventWriter, markers: Markers, ends: tuple[str, ...], keys: Keys) -> Steps[None]:
    """Content, and calls between a marker and one of `ends` or the end of the text."""
    while (yield from scan.until(markers, writer.content)):
        before = writer.num_calls
        try:
            yield from calls(scan, writer, keys)
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, ends, called=writer.num_calls > before)


def close(scan: Scanner, writer: EventWriter, ends: tuple[str, ...], *, called: bool) -> Steps[None]:
    """Behind calls: the white space around their end marker belongs to it, even if that is missing at the very end."""
    if not called:
        return
    yield from scan.skip_space()
    if ends and not (yield from scan.try_text(*ends)) and (yield from scan.peek()):
        writer.no_markup()
        return
    yield from scan.skip_space()
    scan.settle()
