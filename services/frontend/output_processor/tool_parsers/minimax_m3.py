"""Tool calls of MiniMax M3, with ]<]minimax[>[ before each tag:

<tool_call>
<invoke name="add"><a>1</a><tags><item>x</item><item>y</item></tags><range><min>0</min></range></invoke>
</tool_call>

Objects and lists are elements again; only the tool's schema distinguishes them.
"""

from __future__ import annotations

import json

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, Json, sequence
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup.element_grammar import member_elements
from quire.services.frontend.output_processor.parsing.markup.marked_tags import MarkedTagSyntax, Tag, marked_calls
from quire.services.frontend.output_processor.parsing.scanner import WHITE, Malformed, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import SchemaPart, ToolSchemas
from quire.services.frontend.output_processor.parsing.values.typed_arguments import STRING, TypedArguments, as_json
from quire.services.frontend.output_processor.parsing.writer import EventWriter
from quire.services.frontend.request.request import Tool

MARK = "]<]minimax[>["
TAGS = MarkedTagSyntax({MARK: False}, opening="<", ends_with_slash=True)
BLOCK, CALL, ITEM = "tool_call", "invoke", "item"
PARAMETER = "parameter"  # element of MiniMax M2, with the parameter's name as an attribute
DEEPEST = 64


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
            yield from self._call(tag.attributes.get("name", ""))
        return tag.name in (BLOCK, CALL)

    def _call(self, name: str) -> Steps[None]:
        """Reads up to the end of the call, or up to a tag that belongs to no call."""
        if not name:
            raise Malformed
        arguments = TypedArguments(self._scan, self._writer, self._schemas, name)
        while True:
            yield from self._scan.skip_space()
            begin = self._scan.at
            if not (yield from self._scan.next_is(MARK)):
                yield from self._without_start(arguments, name)
                continue
            tag = yield from TAGS.next_tag(self._scan)
            if tag.name in (BLOCK, CALL):
                self._scan.at = self._scan.at if tag.is_end and tag.name == CALL else begin
                break
            if not tag.is_end:
                key = tag.attributes.get("name", tag.name) if tag.name == PARAMETER else tag.name
                yield from self._parameter(arguments, self._schemas.part(name, key), key, tag.name)
        arguments.end()
        self._writer.end_call()

    def _parameter(self, arguments: TypedArguments, part: SchemaPart, name: str, element: str) -> Steps[None]:
        """Reads a parameter, in an element of its own name or of M2's, and adds it to the arguments: strings piece by
        piece, other types as a whole. Its end tag may be missing before another tag."""
        if part.types == STRING:
            mark = yield from arguments.parameter(name, STRING, TAGS.in_values)
            self._scan.at -= len(mark)
        else:
            arguments.add(name, (yield from self._value(part, element, 0)))

    def _without_start(self, arguments: TypedArguments, function: str) -> Steps[None]:
        """Reads a parameter whose start tag the model has omitted; its end tag has the name."""
        texts: list[str] = []
        mark = yield from self._scan.read_until(TAGS.in_values, texts.append)
        if not mark:
            raise Malformed
        tag = yield from TAGS.tag(self._scan, mark)
        if not tag.is_end or not arguments.may_begin(tag.name):
            raise Malformed
        arguments.add(tag.name, _leaf("".join(texts), self._schemas.part(function, tag.name)))

    def _value(self, part: SchemaPart, name: str, depth: int) -> Steps[str]:
        """Returns a value as JSON, read from after its tag up to the end of its element."""
        texts: list[str] = []
        elements: list[tuple[str, str]] = []
        while mark := (yield from self._scan.read_until(TAGS.in_values, texts.append)):
            begin = self._scan.at - len(mark)
            tag = yield from TAGS.tag(self._scan, mark)
            if tag.is_end or tag.name in (BLOCK, CALL):
                self._scan.at = self._scan.at if tag.name == name else begin
                return _container(elements, part) if elements else _leaf("".join(texts), part)
            if depth == DEEPEST:
                break
            elements.append((tag.name, (yield from self._value(part.inner(tag.name), tag.name, depth + 1))))
        raise Malformed


def _leaf(text: str, part: SchemaPart) -> str:
    if not text.strip(WHITE) and "string" not in part.types:
        return next((empty for kind, empty in (("array", "[]"), ("object", "{}")) if kind in part.types), '""')
    return as_json(text, part.types)


def _container(elements: list[tuple[str, str]], part: SchemaPart) -> str:
    """Returns elements as a list where the schema asks for one, or where it is open and all are named "item"."""
    is_list, is_object = "array" in part.types, "object" in part.types
    if is_list if is_list != is_object else all(name == ITEM for name, _ in elements):
        return f"[{', '.join(value for _, value in elements)}]"
    members: dict[str, list[str]] = {}
    for name, value in elements:
        members.setdefault(name, []).append(value)
    return f"{{{', '.join(f'{_key(name)}: {_joined(values)}' for name, values in members.items())}}}"


def _key(name: str) -> str:
    return json.dumps(name, ensure_ascii=False)


def _joined(values: list[str]) -> str:
    """Returns one value, or a list where an element occurs more than once."""
    return values[0] if len(values) == 1 else f"[{', '.join(values)}]"


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    return _CallReader(scan, writer, schemas).read()


def _call_format(tool: Tool) -> Json:
    """Returns the format of one call: an element for each parameter, in the order of the schema."""
    members = member_elements(MARK, tool.parameters, tool.parameters)
    return sequence(f'{MARK}<{CALL} name="{tool.name}">', *members, f"{MARK}</{CALL}>")


GRAMMAR = CallGrammar(_call_format, before=f"{MARK}<{BLOCK}>\n", after=f"\n{MARK}</{BLOCK}>", plain_texts=True)
FORMAT = ToolFormat(read, (MARK,), grammars=(GRAMMAR,), starts=(f"{MARK}<{BLOCK}>", f'{MARK}<{CALL} name="'))
