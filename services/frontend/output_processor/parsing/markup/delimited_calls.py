"""Calls whose arguments end at markers that cannot occur in JSON."""

from __future__ import annotations

from quire.services.frontend.output_processor.parsing.scanner import LONGEST_PADDING, Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.values.json_repair import IncrementalJson
from quire.services.frontend.output_processor.parsing.writer import EventWriter

FENCE = "```"


def fence(text: str, start: int, end: int) -> int:
    """Returns where the padding of a marker after a fenced block begins: the fence, and the white space around it."""
    begin = max(start, end - LONGEST_PADDING)
    body = text[begin:end].rstrip()
    ticks = len(body) - len(body.rstrip("`"))
    return begin + (len(body[:-ticks].rstrip()) if 0 < ticks <= len(FENCE) else len(body))


def arguments(scan: Scanner, writer: EventWriter, out: ArgumentsWriter, ends: Markers) -> Steps[str]:
    """Reads the arguments of the last started call up to one of `ends`, which is returned, or the end of the text.

    Text between the arguments and the end marker is content. Raises Malformed if the arguments have not begun.
    """
    pushed = IncrementalJson(out)
    yield from scan.skip_space()
    end_marker = yield from scan.read_until(ends, pushed.push)
    if end_marker:
        pushed.end()
    rest = pushed.rest
    if not pushed.is_complete and (not end_marker or (rest and not out.has_begun)):
        raise Malformed
    writer.end_call()
    if rest:
        writer.content(rest)
    return end_marker
