"""Tool calls of Llama 3.1 to 3.3 and 4: {"name": "add", "parameters": {"a": 1}}, with or without text or <|python_tag|>
before it, several separated by ";"; and built-in tools as <|python_tag|>add.call(a=1)."""

from __future__ import annotations

import re

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar, json_arguments
from quire.services.frontend.output_processor.parsing.formats import ToolFormat
from quire.services.frontend.output_processor.parsing.markup import python_calls
from quire.services.frontend.output_processor.parsing.markup.call_blocks import read_call_end, reject_call
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, Keys, calls
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values import json_repair
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.writer import EventWriter

TAG, BRACKET = "<|python_tag|>", "{"
STARTS = Markers(TAG, BRACKET)
KEYS = Keys(others=("type", "function"))
NAME = re.compile(r"[\w.\-]+")
METHOD = ".call"  # suffix of built-in tools


def read(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads an answer. Many answers contain objects: only those with the name of an offered tool are calls."""
    yield from scan.skip_space()
    if (yield from scan.next_is("[")):
        yield from _calls(scan, writer, schemas, scan.at)
    while marker := (yield from scan.read_until(STARTS, writer.content)):
        if marker == TAG:
            yield from scan.skip_space()
        else:
            scan.at -= len(BRACKET)
        yield from _calls(scan, writer, schemas, scan.at)


def _calls(scan: Scanner, writer: EventWriter, schemas: ToolSchemas, begin: int) -> Steps[None]:
    """Reads calls from `begin` on, or else content: a whole object, since calls do not occur within objects."""
    before = writer.num_calls
    try:
        if (yield from scan.next_is(BRACKET, "[")):
            yield from calls(scan, writer, KEYS, schemas.__contains__, between=";")
        else:
            yield from _built_in(scan, writer, schemas)
    except Malformed:
        called = writer.num_calls > before
        if called or writer.in_call or writer.abort_call():
            reject_call(scan, writer, called=called)
        else:
            scan.at = begin
            yield from _reject_object(scan, writer)
    yield from read_call_end(scan, writer, (), called=writer.num_calls > before)


def _reject_object(scan: Scanner, writer: EventWriter) -> Steps[None]:
    """Writes an object, or whatever is malformed, as content without the tag before it."""
    writer.content(scan.uncommitted.replace(TAG, ""))
    try:
        if (yield from scan.next_is(BRACKET)):
            yield from json_repair.value(scan, ArgumentsWriter(lambda _part: writer.flush_as_content()))
    except Malformed:
        pass
    writer.flush_as_content()


def _built_in(scan: Scanner, writer: EventWriter, schemas: ToolSchemas) -> Steps[None]:
    """Reads a call of the form name.call(a=1); raises Malformed if the request has no such tool."""
    name = yield from scan.read_run(NAME, LONGEST_NAME)
    yield from scan.expect("(")
    name = name.removesuffix(METHOD)
    if name not in schemas:
        raise Malformed
    yield from python_calls.arguments(scan, writer, schemas, name)


GRAMMAR = CallGrammar(json_arguments('{"name": NAME, "parameters": ', "}"), between="; ")
FORMAT = ToolFormat(read, (TAG,), grammars=(GRAMMAR,), starts=(TAG,))
