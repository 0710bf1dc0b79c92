"""Reasoning of Muse Glimmer, whose answers are messages to recipients: self is reasoning, user or none is content, and
any other name is a tool, whose calls are content for the parser of calls.

 to=self<|message|>…<|eom|><|start|>assistant to=user<|message|>…<|eot|>

The prompt ends after the role. A message may begin without the end of the one before it.
"""

from __future__ import annotations

import re

from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat
from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import no_padding
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Sink, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, MESSAGE, END, END_OF_TURN = "<|start|>", "<|message|>", "<|eom|>", "<|eot|>"
TOKENS = (START, MESSAGE, END, END_OF_TURN)
ROLE, TO, SELF, USER = "assistant", "to=", "self", "user"
RECIPIENT = re.compile(r"[^\s<>]+")
IN_BODY = Markers(*TOKENS, TO, padding=no_padding)


def read(scan: Scanner, writer: EventWriter, is_open: bool, _calls: CallProbe) -> Steps[None]:
    """Reads all messages of an answer. A call that is quoted in reasoning is none, since calls have recipients."""
    recipient = SELF if is_open else (yield from _recipient(scan))
    while True:
        scan.commit()
        yield from _body(scan, writer.reasoning if recipient == SELF else writer.content)
        scan.commit()
        if not (yield from scan.peek()):
            return
        recipient = yield from _recipient(scan)


def _recipient(scan: Scanner) -> Steps[str]:
    """Reads a header and returns its recipient, USER if it names none; text without a header is not consumed."""
    begin = scan.at
    yield from scan.skip_space()
    while (yield from scan.try_text(START, END, END_OF_TURN)):
        yield from scan.skip_space()
        yield from scan.try_text(ROLE)
        yield from scan.skip_space()
        begin = scan.at
    name = yield from _name(scan)
    if name is None and not (yield from scan.try_text(MESSAGE)):
        scan.at = begin
    return name or USER


def _name(scan: Scanner) -> Steps[str | None]:
    """Reads a recipient and the marker after it; None, and nothing consumed, for other text."""
    begin = scan.at
    if (yield from scan.try_text(TO)):
        try:
            name = yield from scan.read_run(RECIPIENT, LONGEST_NAME)
        except Malformed:
            name = ""
        if name and (yield from scan.try_text(MESSAGE)):
            return name
    scan.at = begin
    return None


def _body(scan: Scanner, sink: Sink) -> Steps[None]:
    """Reads a message's text into the sink, up to its end, which is consumed, or to the next message's header."""
    while marker := (yield from scan.read_until(IN_BODY, sink)):
        if marker in (END, END_OF_TURN):
            return
        begin = scan.at
        scan.at -= len(marker)
        if marker == START or (marker == TO and (yield from _comes_header(scan))):
            return
        scan.at = begin
        if marker == TO:
            sink(TO)


def _comes_header(scan: Scanner) -> Steps[bool]:
    """Returns whether a recipient and the marker after it follow; consumes nothing."""
    begin = scan.at
    name = yield from _name(scan)
    scan.at = begin
    return name is not None


FORMAT = ReasoningFormat(
    read,
    TOKENS,
    starts=(f" {TO}{SELF}{MESSAGE}", f"{TO}{SELF}{MESSAGE}"),
    ends=(END,),
    after_end=f"{START}{ROLE}",
    content_start=f" {TO}{USER}{MESSAGE}",
)
