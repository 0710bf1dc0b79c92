"""gpt-oss: <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

The recipient may also stand in front of the channel: <|start|>assistant to=functions.add<|channel|>commentary …
What belongs to no call is left to the reasoning parser openai_gptoss, which reads first.
"""

import re
from typing import NamedTuple

from services.frontend.output_processor.parsing.call_blocks import no_call
from services.frontend.output_processor.parsing.delimited_calls import arguments
from services.frontend.output_processor.parsing.formats import ToolFormat
from services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from services.frontend.output_processor.parsing.wording import Wording, json_arguments
from services.frontend.output_processor.parsing.writer import EventWriter

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
END, CALL, RETURN, CONSTRAIN = "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"
TOKENS = (START, CHANNEL, MESSAGE, END, CALL, RETURN, CONSTRAIN)
STARTS = Markers(START, CHANNEL)
HEADER_ENDS = Markers(MESSAGE, END, CALL, RETURN, START)
ENDS = Markers(END, CALL, RETURN, START)
HEADER = re.compile(
    r"(?:assistant)?\s*(?:to=(?P<first>[^\s<>]+))?\s*(?:<\|channel\|>)?[\s–—-]*(?P<channel>analysis|commentary|final)?"
    r"\s*(?:to=(?P<second>[^\s<>]+))?\s*(?:<\|constrain\|>\s*[^\s<>]*|json|code|text)?\s*"
)
LONGEST_HEADER = 512  # characters
FUNCTIONS = "functions."


class MessageHeader(NamedTuple):
    """What a message is, and for whom."""

    channel: str
    recipient: str  # of a call: the function


def header(scan: Scanner) -> Steps[MessageHeader]:
    """From behind its first marker up to its message, which is read; Malformed if it does not look like one."""
    parts: list[str] = []
    end = yield from scan.until(HEADER_ENDS, scan.keeping(parts, LONGEST_HEADER))
    if end == START:
        scan.at -= len(START)
    if end != MESSAGE:
        raise Malformed
    found = HEADER.fullmatch("".join(parts))
    if found is None:
        raise Malformed
    recipient = found["first"] or found["second"] or ""
    return MessageHeader(found["channel"] or "", recipient.removeprefix(FUNCTIONS))


def read(scan: Scanner, writer: EventWriter, _schemas: ToolSchemas) -> Steps[None]:
    while (yield from scan.until(STARTS, writer.content)):
        try:
            recipient = (yield from header(scan)).recipient
            if not recipient:
                raise Malformed
            found = yield from arguments(scan, writer, writer.start(recipient), ENDS)
        except Malformed:
            no_call(scan, writer)
            continue
        if found == START:
            scan.at -= len(START)
        scan.settle()


WORDING = Wording(
    json_arguments(f"{CHANNEL}commentary to={FUNCTIONS}NAME {CONSTRAIN}json{MESSAGE}", "", quote=False),
    between=f"{CALL}{START}assistant",
)
FORMAT = ToolFormat(read, TOKENS, wordings=(WORDING,))
