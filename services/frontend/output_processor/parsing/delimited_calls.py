"""Calls in which markers that no JSON holds say where the arguments end."""

from __future__ import annotations

from services.frontend.output_processor.parsing.scanner import LONGEST_PADDING, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.writer import Writer

FENCE = "```"


def fence(text: str, start: int, end: int) -> int:
    """Padding of markers behind a fenced block: the fence, and the white space around it."""
    begin = max(start, end - LONGEST_PADDING)
    body = text[begin:end].rstrip()
    ticks = len(body) - len(body.rstrip("`"))
    return begin + (len(body[:-ticks].rstrip()) if 0 < ticks <= len(FENCE) else len(body))


def arguments(scan: Scanner, writer: Writer, ends: Markers) -> Steps[str]:
    """As they are written, up to one of `ends`, which is returned, or the end of the text."""
    yield from scan.skip_space()
    return (yield from scan.until(ends, writer.arguments))
