"""Calls written as JSON objects with a name and arguments: one or several, in an array or not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.values import json_repair, json_text
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.writer import EventWriter

LONGEST_NAME = 256  # characters
LONGEST_KEY = 64
FUNCTION = "function"  # member that holds the call where a model writes the shape of OpenAI's API

IsName = Callable[[str], bool]


def any_name(name: str) -> bool:
    return bool(name)


@dataclass(frozen=True, slots=True)
class Keys:
    """Names that a format gives to the members of a call."""

    name: str = "name"
    arguments: tuple[str, ...] = ("arguments", "parameters")
    id: str = "id"
    others: tuple[str, ...] | None = None  # other members that a call may have; None: any

    def allow(self, key: str) -> bool:
        return self.others is None or key in (self.name, *self.arguments, self.id, *self.others)


class _Call:
    """Reader of one object, which is a call once its name is known and its arguments begin, or once it ends."""

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
        """Reads one call object and writes it. Arguments before the name are kept until it is known; raises
        Malformed without a name."""
        yield from self._object()
        if not self._started:
            call = self._start()
            if self._early:
                call.scalar("".join(self._early))
        self._writer.end_call()

    def _object(self) -> Steps[None]:
        yield from self._scan.expect("{")
        yield from self._scan.skip_space()
        if not (yield from self._scan.try_text("}")):
            yield from self._members()

    def _members(self) -> Steps[None]:
        """Reads the members up to and including the closing brace."""
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
        """Reads one member's value: name, arguments, id, or a value that is discarded. Raises Malformed for a key
        that is not allowed or a name that is no tool."""
        if not self._keys.allow(key):
            raise Malformed
        if key == self._keys.name and not self._name:
            self._name = yield from json_text.short_string(self._scan, LONGEST_NAME)
            if not self._is_name(self._name):
                raise Malformed
        elif key in self._keys.arguments and not self._started and not self._early:
            yield from self._arguments()
        elif key == self._keys.id and (yield from self._scan.next_is(*json_text.PLAIN)):
            self._id = yield from json_text.short_string(self._scan, LONGEST_NAME)
        elif key == FUNCTION and not self._name and (yield from self._scan.next_is("{")):
            yield from self._object()
        else:
            yield from json_repair.value(self._scan, ArgumentsWriter(_discard))

    def _arguments(self) -> Steps[None]:
        """Reads the arguments: an object, an object within a string, or null for none."""
        first = yield from self._scan.peek()
        if first == "{":
            yield from json_repair.value(self._scan, self._out())
        elif first in json_text.PLAIN:
            pushed = json_repair.IncrementalJson(self._out())
            yield from json_text.string(self._scan, pushed.push)
            pushed.end()
            if pushed.rest:
                raise Malformed
        else:
            yield from self._scan.expect("null")

    def _out(self) -> ArgumentsWriter:
        return self._start() if self._name else ArgumentsWriter(self._early.append)

    def _start(self) -> ArgumentsWriter:
        """Starts the call in the writer and returns the writer of its arguments; raises Malformed without a name."""
        if not self._name:
            raise Malformed
        self._started = True
        return self._writer.start_call(self._name, self._id)


def _discard(_part: str) -> None:
    """Discards the text of members that are not part of the call."""


def calls(
    scan: Scanner, writer: EventWriter, keys: Keys, is_name: IsName = any_name, between: str = ","
) -> Steps[None]:
    """Reads one object, several separated by `between` or white space, or an array of them."""
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
        scan.commit()
