"""Types that the files in tool_parsers/ and reasoning_parsers/ instantiate."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from dataclasses import dataclass

from quire.services.frontend.output_processor.parsing.call_grammar import CallGrammar
from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, call_blocks
from quire.services.frontend.output_processor.parsing.markup.json_calls import IsName, Keys, calls
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.writer import EventWriter

ReadAnswer = Callable[[Scanner, EventWriter, bool, IsName], Steps[None]]
"""Reads whole answers, in which reasoning and calls are messages of one stream.

The flag: the prompt ends within reasoning; the predicate: whether a name is that of an offered tool.
"""


def call_id(_index: int, _name: str) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """Format in which models of a family write calls."""

    read: Callable[[Scanner, EventWriter, ToolSchemas], Steps[None]]
    tokens: tuple[str, ...]  # markup that tokenizers have as special tokens; must not be skipped in the text
    # makes the id of a call without one, from its index in the answer and its name
    new_id: Callable[[int, str], str] = call_id
    grammars: tuple[CallGrammar, ...] = ()  # for required calls; the first whose token exists is used
    starts: tuple[str, ...] = ()  # markers that begin calls, also within reasoning; none contains another
    read_answer: ReadAnswer | None = None
    frames_text: bool = False  # plain text has markup as well, with or without tools


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """Format in which models of a family write reasoning. All text outside of it is content, tool calls included."""

    read: Callable[[Scanner, EventWriter, bool, CallProbe], Steps[None]]  # the flag: the prompt ends within reasoning
    tokens: tuple[str, ...]
    starts: tuple[str, ...] = ()  # markers that begin reasoning; a prompt may end with one
    ends: tuple[str, ...] = ()
    after_end: str = ""  # text between the end of reasoning and the answer
    content_start: str = ""  # text that begins the content
    read_answer: ReadAnswer | None = None  # replaces `read` where the tools on offer are known, also if there are none


def json_blocks(
    starts: str | tuple[str, ...], *ends: str, keys: Keys | None = None, grammar: CallGrammar | None = None
) -> ToolFormat:
    """Returns the format of JSON objects between markers; without `ends`, up to the end of the JSON."""
    starts = (starts,) if isinstance(starts, str) else starts
    markup = CallMarkup(starts, ends)
    members = keys or Keys()

    def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
        yield from call_blocks(scan, writer, markup, lambda _start: calls(scan, writer, members))

    return ToolFormat(read, (*starts, *ends), grammars=() if grammar is None else (grammar,), starts=starts)
