"""Calls in which markers that no JSON holds say where the arguments end."""

from __future__ import annotations

from collections.abc import Callable

from services.frontend.output_processor.parsing.json_calls import close
from services.frontend.output_processor.parsing.scanner import LONGEST_PADDING, Malformed, Markers, Scanner, Steps
from services.frontend.output_processor.parsing.writer import EventWriter

FENCE = "```"


def fence(text: str, start: int, end: int) -> int:
    """Padding of markers behind a fenced block: the fence, and the white space around it."""
    begin = max(start, end - LONGEST_PADDING)
    body = text[begin:end].rstrip()
    ticks = len(body) - len(body.rstrip("`"))
    return begin + (len(body[:-ticks].rstrip()) if 0 < ticks <= len(FENCE) else len(body))


def arguments(scan: Scanner, writer: EventWriter, ends: Markers) -> Steps[str]:
    """As they are written, up to one of `ends`, which is returned, or the end of the text."""
    yield from scan.skip_space()
    return (yield from scan.until(ends, writer.arguments))


def blocks(
    scan: Scanner,
    writer: EventWriter,
    *,
    starts: tuple[str, ...],
    call: str,
    ends: tuple[str, ...],
    calls: Callable[[Scanner, EventWriter], Steps[None]],
) -> Steps[None]:
    """Text with blocks of calls in it; models leave out what begins a block. `calls` reads behind the first `call`."""
    markers = Markers(*starts, call)
    while begin := (yield from scan.until(markers, writer.content)):
        before = writer.num_calls
        try:
            yield from scan.skip_space()
            if begin != call:
                yield from scan.expect(call)
            yield from calls(scan, writer)
        except Malformed:
            writer.no_markup()
        yield from close(scan, writer, ends, called=writer.num_calls > before)
