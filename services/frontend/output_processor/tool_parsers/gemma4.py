"""Gemma 4: <|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>, and FunctionGemma:
<start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>

Objects and lists nest; keys have no quotation marks; only strings have a delimiter."""

from __future__ import annotations

import re

from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.json_calls import LONGEST_NAME, close
from services.frontend.output_processor.parsing.json_text import quoted
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tagged_calls import no_padding
from services.frontend.output_processor.parsing.tool_schemas import ANYTHING, ToolSchemas
from services.frontend.output_processor.parsing.typed_arguments import as_json
from services.frontend.output_processor.parsing.writer import EventWriter

DEEPEST = 64
NAME = re.compile(r"[^\s<>{}\[\]:,\"']+")
BARE = re.compile(r"[^<>{}\[\],]+")
LONGEST_BARE = 4096
CALL = "call:"


class _Reading:
    """Of one text."""

    def __init__(self, start: str, end: str, delimiter: str, scan: Scanner, writer: EventWriter) -> None:
        self._starts = Markers(start)
        self._end = end
        self._delimiter = delimiter
        self._delimiters = Markers(delimiter, padding=no_padding)
        self._scan = scan
        self._writer = writer

    def run(self) -> Steps[None]:
        while (yield from self._scan.until(self._starts, self._writer.content)):
            before = self._writer.num_calls
            try:
                yield from self._call()
            except Malformed:
                self._writer.no_markup()
            yield from close(self._scan, self._writer, (self._end,), called=self._writer.num_calls > before)

    def _call(self) -> Steps[None]:
        yield from self._scan.skip_space()
        yield from self._scan.expect(CALL)
        name = yield from self._scan.whole(NAME, LONGEST_NAME)
        if not name or not (yield from self._scan.comes("{")):
            raise Malformed
        self._writer.start(name)
        yield from self._object(0)

    def _object(self, depth: int) -> Steps[None]:
        yield from self._scan.expect("{")
        self._writer.arguments("{")
        separator = ""
        yield from self._scan.skip_space()
        while not (yield from self._scan.try_text("}")):
            key = yield from self._key()
            self._writer.arguments(f'{separator}"{quoted(key)}": ')
            separator = ", "
            yield from self._value(depth + 1)
            yield from self._end_of_item("}")
        self._writer.arguments("}")

    def _key(self) -> Steps[str]:
        delimited = yield from self._scan.try_text(self._delimiter)
        key = yield from self._scan.whole(NAME, LONGEST_NAME)
        if delimited:
            yield from self._scan.expect(self._delimiter)
        yield from self._scan.skip_space()
        yield from self._scan.expect(":")
        yield from self._scan.skip_space()
        return key

    def _list(self, depth: int) -> Steps[None]:
        yield from self._scan.expect("[")
        self._writer.arguments("[")
        separator = ""
        yield from self._scan.skip_space()
        while not (yield from self._scan.try_text("]")):
            if separator:
                self._writer.arguments(separator)
            separator = ", "
            yield from self._value(depth + 1)
            yield from self._end_of_item("]")
        self._writer.arguments("]")

    def _end_of_item(self, end: str) -> Steps[None]:
        yield from self._scan.skip_space()
        if not (yield from self._scan.comes(end)):
            yield from self._scan.expect(",")
            yield from self._scan.skip_space()

    def _value(self, depth: int) -> Steps[None]:
        if depth > DEEPEST:
            raise Malformed
        if (yield from self._scan.try_text(self._delimiter)):
            yield from self._string()
        elif (yield from self._scan.comes("{")):
            yield from self._object(depth)
        elif (yield from self._scan.comes("[")):
            yield from self._list(depth)
        else:
            text = yield from self._scan.whole(BARE, LONGEST_BARE)
            if not text.strip():
                raise Malformed
            self._writer.arguments(as_json(text.strip(), ANYTHING))

    def _string(self) -> Steps[None]:
        self._writer.arguments('"')
        if (yield from self._scan.until(self._delimiters, lambda text: self._writer.arguments(quoted(text)))):
            self._writer.arguments('"')


def marked(start: str, end: str, delimiter: str) -> ToolFormat:
    def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
        yield from _Reading(start, end, delimiter, scan, writer).run()

    return ToolFormat(read, (start, end, delimiter), starts=(start,))


FORMAT = marked("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = marked("<start_function_call>", "<end_function_call>", "<escape>")
