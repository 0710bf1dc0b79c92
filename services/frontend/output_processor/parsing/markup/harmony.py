"""Reader of gpt-oss's stream of messages: reasoning, text and calls.

<|start|>assistant<|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>commentary to=functions.add
<|constrain|>json<|message|>{"a": 1}<|call|>

A header has a role, a recipient (after the role or after the channel), a channel and a content type; the prompt ends
after the role. Source: https://github.com/openai/harmony, docs/format.md. Models omit markers, double them and put
other text into headers: markers never reach the user, and a message is classified by what can be read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from quire.services.frontend.output_processor.parsing.markup.json_calls import LONGEST_NAME, IsName
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Sink, Steps
from quire.services.frontend.output_processor.parsing.values.json_repair import IncrementalJson
from quire.services.frontend.output_processor.parsing.writer import EventWriter

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
ANALYSIS, COMMENTARY, FINAL = "analysis", "commentary", "final"
FUNCTIONS = "functions."

ALL = Markers(*TOKENS)
HEADER_ENDS = Markers(MESSAGE, END, CALL, RETURN, START)
LONGEST_HEADER = 512  # characters
MOST_HEADER_WORDS = 5  # role, recipient, channel, recipient, content type
HEADER_WORDS = ("assistant", ANALYSIS, COMMENTARY, FINAL, "json", "to=")

NAME = re.compile(r"[^\s<>]+")
RECIPIENT = re.compile(r"to=\s*([^\s<>]+)")
CHANNEL_NAME = re.compile(r"(?:<\|channel\|>|assistant|\A)[\W_]*(analysis|commentary|final)")
OTHER_ROLE = re.compile(r"\s*(?:user|system|developer|tool|functions\.)")
# The part of a header that can be read, for headers without an end marker.
READABLE = re.compile(
    r"\s*(?:assistant)?\s*(?:to=\s*[^\s<>]+)?\s*(?:<\|channel\|>)*[\s–—-]*(?:analysis|commentary|final)?"
    r"\s*(?:to=\s*[^\s<>]+)?\s*(?:<\|constrain\|>\s*(?:json|code|text)?|json)?\s*"
)
CONTENT_TYPES = ("json", "code", "text")
LEFT_BRACKETS = " \t\r\n}]"  # surplus brackets after arguments


class MessageHeader(NamedTuple):
    """Channel of a message and the tool that it calls, if any."""

    channel: str = ""
    tool: str = ""
    is_hidden: bool = False  # from another role, or for a recipient that is neither the user nor a function

    @property
    def reasons(self) -> bool:
        return not self.tool and (self.is_hidden or self.channel == ANALYSIS)


def parsed(text: str, is_tool: IsName) -> MessageHeader:
    """Parses a message's header, the text between <|start|> and <|message|>. Messages of other roles and to other
    recipients than functions are hidden."""
    recipients = RECIPIENT.findall(text)
    channels = CHANNEL_NAME.findall(RECIPIENT.sub(" ", text))
    is_for_function = any(recipient.startswith(FUNCTIONS) for recipient in recipients)
    is_hidden = OTHER_ROLE.match(text) is not None or (bool(recipients) and not is_for_function)
    return MessageHeader(channels[-1] if channels else "", _tool(recipients, is_tool), is_hidden)


def _tool(recipients: Iterable[str], is_tool: IsName) -> str:
    """Returns the first recipient that is an offered tool; some models append the content type to the name directly."""
    for recipient in recipients:
        name = recipient.removeprefix(FUNCTIONS)
        for candidate in (name, recipient, name.removesuffix("json")):
            if candidate and is_tool(candidate):
                return candidate
    return ""


def _is_message(text: str, header: MessageHeader) -> bool:
    """Returns whether text after a header without <|message|> is its message, not one more word or a partial marker."""
    if header.tool:
        return text.startswith("{")
    return header.channel in (ANALYSIS, FINAL) and not any(token.startswith(text.strip()) for token in TOKENS)


def read_messages(scan: Scanner, writer: EventWriter, is_open: bool, is_tool: IsName) -> Steps[None]:
    """Reads all messages of an answer.

    `is_open`: the prompt ends within an analysis; `is_tool`: whether a call of that name may be announced.
    """
    yield from _HarmonyReader(scan, writer, is_tool).read(is_open)


class _HarmonyReader:
    """Reader of one answer."""

    def __init__(self, scan: Scanner, writer: EventWriter, is_tool: IsName) -> None:
        self._scan = scan
        self._writer = writer
        self._is_tool = is_tool
        self._kinds_written: set[bool] = set()  # True: reasoning

    def read(self, is_open: bool) -> Steps[None]:
        """Reads messages to the end of the answer; `is_open` says that the prompt ends within a reasoning message."""
        if is_open:
            yield from self._text(reasons=True)
        while (yield from self._scan.peek()):
            if not (yield from self._header_comes()):
                yield from self._text(reasons=False)
            elif (header := (yield from self._header())) is None:
                continue
            elif header.tool:
                yield from self._call(header)
            else:
                yield from self._text(reasons=header.reasons)

    def _header_comes(self) -> Steps[bool]:
        """Returns whether a header follows, also one without <|start|>, which the prompt contains or models omit;
        consumes nothing."""
        begin = self._scan.at
        is_header = False
        for _ in range(MOST_HEADER_WORDS + 1):
            yield from self._scan.skip_space()
            is_header = yield from self._scan.next_is(START, CHANNEL)
            is_header = is_header or (self._scan.at > begin and (yield from self._scan.next_is(MESSAGE, CONSTRAIN)))
            if is_header or not (word := (yield from self._scan.try_text(*HEADER_WORDS))):
                break
            if word == "to=" and (is_header := (yield from self._recipient_is_known())):
                break
        self._scan.at = begin
        return is_header

    def _recipient_is_known(self) -> Steps[bool]:
        """Returns whether a function's name follows "to=", or the text ends there. Other text may merely look like a
        header."""
        yield from self._scan.skip_space()
        try:
            name = yield from self._scan.read_run(NAME, LONGEST_NAME)
        except Malformed:
            return False
        return name.startswith(FUNCTIONS) or not (yield from self._scan.peek())

    def _header(self) -> Steps[MessageHeader | None]:
        """Reads a header up to its message; None for a header without a recognizable message."""
        yield from self._scan.skip_space()
        yield from self._scan.try_text(START)
        begin = self._scan.at
        parts: list[str] = []
        try:
            end = yield from self._scan.read_until(HEADER_ENDS, self._scan.bounded_sink(parts, LONGEST_HEADER))
            is_too_long = False
        except Malformed:
            end, is_too_long = "", True
        text = "".join(parts)[:LONGEST_HEADER]
        header = parsed(text, self._is_tool)
        if end != MESSAGE:
            readable = READABLE.match(text)
            size = readable.end() if readable else 0
            header = parsed(text[:size], self._is_tool)
            if is_too_long or _is_message(text[size:], header):
                self._scan.at = begin + size
            else:
                self._scan.at -= len(START) if end == START else 0
                self._scan.commit()
                return None
        self._scan.commit()
        return header

    def _text(self, *, reasons: bool) -> Steps[None]:
        yield from self._body(self._separated(reasons))
        self._scan.commit()

    def _body(self, sink: Sink) -> Steps[None]:
        """Reads a message's text into the sink up to its end, and drops misplaced markers; a marker that begins the
        next message is left unread."""
        while (marker := (yield from self._scan.read_until(ALL, sink))) in (MESSAGE, CONSTRAIN):
            pass
        if marker in (START, CHANNEL):
            self._scan.at -= len(marker)

    def _separated(self, reasons: bool) -> Sink:
        """Returns a sink for one message's reasoning or content, which begins on a new line if its kind was written
        before."""
        separator = "\n" if reasons in self._kinds_written else ""

        def write(text: str) -> None:
            """Writes text as reasoning or content; the separator precedes only the first piece."""
            nonlocal separator
            (self._writer.reasoning if reasons else self._writer.content)(separator + text)
            separator = ""
            self._kinds_written.add(reasons)

        return write

    def _call(self, header: MessageHeader) -> Steps[None]:
        """Reads a message as the call of a function; a body that is no JSON object is written as content if no
        arguments were sent."""
        out = self._writer.start_call(header.tool)
        arguments, early = IncrementalJson(out), list[str]()

        def push(text: str) -> None:
            if not out.has_begun:
                early.append(text)
            arguments.push(text)

        yield from self._scan.skip_space()
        yield from self._scan.try_text(*CONTENT_TYPES)
        yield from self._body(push)
        if text := self._end_call(arguments, "" if out.has_begun else "".join(early).strip(), has_begun=out.has_begun):
            self._separated(False)(text)
        self._scan.commit()

    def _end_call(self, arguments: IncrementalJson, text: str, *, has_begun: bool) -> str:
        """Closes the arguments and returns the text that belongs to no call: after it, or in its place.

        Arguments that end before the first of them is known are neither.
        """
        if has_begun or not text:  # a tool without parameters
            self._writer.end_call()
            return arguments.rest.strip(LEFT_BRACKETS) if arguments.is_complete else ""
        self._writer.abort_call()
        return text if arguments.is_finished else ""
