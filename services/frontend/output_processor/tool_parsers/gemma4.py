"""Tool calls of Gemma 4: <|tool_call>call:add{a:1,b:<|"|>two<|"|>}<tool_call|>, and FunctionGemma:
<start_function_call>call:add{a:1,b:<escape>two<escape>}<end_function_call>

Objects and lists nest; keys have no quotation marks; only strings have a delimiter."""

from __future__ import annotations

import re

from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import no_padding
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ANYTHING, ToolSchemas
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.values.json_text import quoted
from quire.services.frontend.output_processor.parsing.values.typed_arguments import as_json
from quire.services.frontend.output_processor.parsing.writer import EventWriter

DEEPEST = 64
NAME = re.compile(r"[^\s<>{}\[\]:,\"']+")
BARE = re.compile(r"[^<>{}\[\],]+")
LONGEST_BARE = 4096
CALL = "call:"


class _CallReader:
    """Reader of the calls in one text."""

    def __init__(self, markup: CallMarkup, delimiter: str, scan: Scanner, writer: EventWriter) -> None:
        self._markup = markup
        self._delimiter = delimiter
        self._delimiters = Markers(delimiter, padding=no_padding)
        self._scan = scan
        self._writer = writer

    def read(self) -> Steps[None]:
        yield from call_blocks(self._scan, self._writer, self._markup, lambda _start: self._call())

    def _call(self) -> Steps[None]:
        """Reads one call; raises Malformed if it has no name or no object of arguments."""
        yield from self._scan.skip_space()
        yield from self._scan.expect(CALL)
        name = yield from self._scan.read_run(NAME, LONGEST_NAME)
        if not name or not (yield from self._scan.next_is("{")):
            raise Malformed
        yield from self._object(self._writer.start_call(name), 0)
        self._writer.end_call()

    def _object(self, out: ArgumentsWriter, depth: int) -> Steps[None]:
        """Reads an object whose keys may be bare and writes it as JSON."""
        yield from self._scan.expect("{")
        out.open("{")
        yield from self._scan.skip_space()
        while not (yield from self._scan.try_text("}")):
            out.key(quoted((yield from self._key())))
            yield from self._value(out, depth + 1)
            yield from self._end_of_item("}")
        out.end()

    def _key(self) -> Steps[str]:
        """Reads a key, bare or between delimiters, and its colon."""
        delimited = yield from self._scan.try_text(self._delimiter)
        key = yield from self._scan.read_run(NAME, LONGEST_NAME)
        if delimited:
            yield from self._scan.expect(self._delimiter)
        yield from self._scan.skip_space()
        yield from self._scan.expect(":")
        yield from self._scan.skip_space()
        return key

    def _list(self, out: ArgumentsWriter, depth: int) -> Steps[None]:
        """Reads a list and writes it as a JSON array."""
        yield from self._scan.expect("[")
        out.open("[")
        yield from self._scan.skip_space()
        while not (yield from self._scan.try_text("]")):
            yield from self._value(out, depth + 1)
            yield from self._end_of_item("]")
        out.end()

    def _end_of_item(self, end: str) -> Steps[None]:
        """Consumes the comma after an item unless `end` follows; raises Malformed for other text."""
        yield from self._scan.skip_space()
        if not (yield from self._scan.next_is(end)):
            yield from self._scan.expect(",")
            yield from self._scan.skip_space()

    def _value(self, out: ArgumentsWriter, depth: int) -> Steps[None]:
        """Reads a delimited text, object, list or bare word and writes it as JSON. Raises Malformed beyond a depth
        of DEEPEST, and for a value that has no end."""
        if depth > DEEPEST:
            raise Malformed
        if (yield from self._scan.try_text(self._delimiter)):
            if not (yield from self._scan.read_until(self._delimiters, lambda text: out.string_part(quoted(text)))):
                raise Malformed
            out.end_string()
        elif (yield from self._scan.next_is("{")):
            yield from self._object(out, depth)
        elif (yield from self._scan.next_is("[")):
            yield from self._list(out, depth)
        else:
            text = yield from self._scan.read_run(BARE, LONGEST_BARE)
            if not text.strip() or not (yield from self._scan.peek()):
                raise Malformed
            out.scalar(as_json(text.strip(), ANYTHING))


def gemma_format(start: str, end: str, delimiter: str) -> ToolFormat:
    """Returns the tool format with the given markers around a call and delimiter around texts."""
    markup = CallMarkup((start,), (end,), stray_markup=re.compile(re.escape(delimiter)))

    def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
        yield from _CallReader(markup, delimiter, scan, writer).read()

    return ToolFormat(read, (start, end, delimiter), starts=(start,))


FORMAT = gemma_format("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = gemma_format("<start_function_call>", "<end_function_call>", "<escape>")
