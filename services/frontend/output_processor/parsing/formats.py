"""What a file in tool_parsers/ or reasoning_parsers/ defines."""

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
"""Reads whole answers, in which reasoning and calls are messages of one stream. The flag: the prompt ends inside of
reasoning; the names: of tools on offer."""


def call_id(_index: int, _name: str) -> str:
    return f"call_{uuid.uuid4().hex[:24]}"


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How models of a family write calls."""

    read: Callable[[Scanner, EventWriter, ToolSchemas], Steps[None]]
    tokens: tuple[str, ...]  # markup that tokenizers have as special tokens: it must not be left out of the text
    new_id: Callable[[int, str], str] = call_id  # of a call without one: its number in the answer, its name
    grammars: tuple[CallGrammar, ...] = ()  # for models that must call; the first whose token is there
    starts: tuple[str, ...] = ()  # markers that begin calls, also inside of reasoning; none is part of another
    read_answer: ReadAnswer | None = None
    frames_text: bool = False  # plain text has markup as well, whether there are tools or not


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How models of a family set their reasoning apart. What is neither goes on as content, tool calls included."""

    read: Callable[
        [Scanner, EventWriter, bool, CallProbe], Steps[None]
    ]  # the flag: the prompt ends inside of reasoning
    tokens: tuple[str, ...]
    starts: tuple[str, ...] = ()  # what begins reasoning; a prompt may end with it
    ends: tuple[str, ...] = ()
    after_end: str = ""  # what follows the end in front of the answer
    content_start: str = ""  # what begins the content
    read_answer: ReadAnswer | None = None  # in place of `read`, where tools are on offer or known to be none


def json_blocks(
    starts: str | tuple[str, ...], *ends: str, keys: Keys | None = None, grammar: CallGrammar | None = None
) -> ToolFormat:
    """JSON objects between markers; without `ends` up to the end of the JSON."""
    starts = (starts,) if isinstance(starts, str) else starts
    markup = CallMarkup(starts, ends)
    members = keys or Keys()

    def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
        yield from call_blocks(scan, writer, markup, lambda _start: calls(scan, writer, members))

    return ToolFormat(read, (*starts, *ends), grammars=() if grammar is None else (grammar,), starts=starts)
