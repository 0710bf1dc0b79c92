"""Tool calls of Kimi K3:

<|open|>tools<|sep|><|open|>call tool="add" index="1"<|sep|><|open|>argument key="a" type="number"<|sep|>1
<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>

without the line break, or <|open|>json type="object"<|sep|>{"a": 1}<|close|>json<|sep|> in place of the arguments.
"""

from __future__ import annotations

from quire.services.frontend.output_processor.parsing.call_grammar import (
    CallGrammar,
    Json,
    ParameterTexts,
    sequence,
    text_parameters,
)
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.marked_tags import MarkedTagSyntax, Tag, marked_calls
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ANYTHING, ToolSchemas
from quire.services.frontend.output_processor.parsing.values.typed_arguments import STRING, TypedArguments
from quire.services.frontend.output_processor.parsing.writer import EventWriter
from quire.services.frontend.request.request import Tool

OPEN, CLOSE, SEPARATOR = "<|open|>", "<|close|>", "<|sep|>"
BLOCK, CALL, ARGUMENT, OBJECT, RESPONSE, MESSAGE = "tools", "call", "argument", "json", "response", "message"
NAMES = (BLOCK, CALL, ARGUMENT, OBJECT, RESPONSE, MESSAGE, "think")
TAGS = MarkedTagSyntax({OPEN: False, CLOSE: True}, closing=SEPARATOR, names=NAMES)


class _CallReader:
    """Reader of the calls in one text."""

    def __init__(self, scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> None:
        self._scan = scan
        self._writer = writer
        self._schemas = schemas

    def read(self) -> Steps[None]:
        yield from marked_calls(self._scan, self._writer, TAGS, self._element)

    def _element(self, tag: Tag) -> Steps[bool]:
        if tag.name == CALL and not tag.is_end:
            yield from self._call(tag.attributes.get("tool", ""))
        return tag.name in (BLOCK, CALL, RESPONSE, MESSAGE)

    def _call(self, name: str) -> Steps[None]:
        """Reads up to the end of the call, or up to a tag that belongs to no call."""
        if not name:
            raise Malformed
        arguments = TypedArguments(self._scan, self._writer, self._schemas, name)
        while True:
            yield from self._scan.skip_space()
            begin = self._scan.at
            tag = yield from TAGS.next_tag(self._scan)
            if tag.name in (BLOCK, CALL, RESPONSE, MESSAGE):
                self._scan.at = self._scan.at if tag.is_end and tag.name == CALL else begin
                break
            if not tag.is_end:
                yield from self._argument(arguments, tag)
        arguments.end()
        self._writer.end_call()

    def _argument(self, arguments: TypedArguments, tag: Tag) -> Steps[None]:
        """Reads one argument by its tag's key and type, or an object of all arguments; raises Malformed for another
        tag."""
        if tag.name == OBJECT:
            yield from self._scan.skip_space()
            yield from arguments.body()
        elif tag.name == ARGUMENT and (key := tag.attributes.get("key", "")):
            types = {None: None, "string": STRING}.get(tag.attributes.get("type"), ANYTHING - STRING)
            mark = yield from arguments.parameter(key, types, TAGS.in_values)
            self._scan.at -= len(mark)
        else:
            raise Malformed


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return _CallReader(scan, writer, schemas).read()


PARAMETERS = text_parameters(
    ParameterTexts(
        function="",
        function_end=f"{CLOSE}{CALL}{SEPARATOR}",
        parameter=f'{OPEN}{ARGUMENT} key="KEY" type="TYPE"{SEPARATOR}',
        parameter_end=f"{CLOSE}{ARGUMENT}{SEPARATOR}",
    )
)


def _call_grammar(tool: Tool) -> Json:
    index = {"type": "regex", "pattern": "[1-9][0-9]{0,2}"}
    return sequence(f'{OPEN}{CALL} tool="{tool.name}" index="', index, f'"{SEPARATOR}', PARAMETERS(tool))


GRAMMAR = CallGrammar(
    _call_grammar,
    before=f"{OPEN}{BLOCK}{SEPARATOR}",
    between="",
    after=f"{CLOSE}{BLOCK}{SEPARATOR}",
    trigger=f"{OPEN}{BLOCK}",
    plain_texts=True,
)
FORMAT = ToolFormat(
    read, (OPEN, CLOSE, SEPARATOR), grammars=(GRAMMAR,), starts=(f"{OPEN}{BLOCK}{SEPARATOR}", f"{OPEN}{CALL} tool=")
)
