"""Reasoning at the beginning of an answer, between two markers."""

from __future__ import annotations

from services.frontend.output_processor.parsing.formats import ReasoningFormat
from services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from services.frontend.output_processor.parsing.writer import EventWriter

Frame = tuple[str, str]


def delimited(
    starts: str | tuple[str, ...], ends: str | tuple[str, ...], *, or_before: str = "", frame: Frame | None = None
) -> ReasoningFormat:
    """A start that stands elsewhere is content: an answer may talk about it.

    `or_before`: what ends reasoning as well and belongs to what follows. `frame`: markup around the content."""
    starts = (starts,) if isinstance(starts, str) else starts
    ends = (ends,) if isinstance(ends, str) else ends
    all_ends = Markers(*ends, *((or_before,) if or_before else ()))
    frame_end = Markers(frame[1]) if frame else None

    def read(scan: Scanner, writer: EventWriter, is_open: bool) -> Steps[None]:
        yield from scan.skip_space()
        if (yield from scan.try_text(*starts)) or is_open:
            yield from _skip_and_settle(scan)
            if (found := (yield from scan.until(all_ends, writer.reasoning))) == or_before:
                scan.at -= len(found)
            yield from _skip_and_settle(scan)
        if frame and frame_end and (yield from scan.try_text(frame[0])):
            yield from _skip_and_settle(scan)
            yield from scan.until(frame_end, writer.content)
            yield from _skip_and_settle(scan)
        writer.no_markup()
        while (yield from scan.peek()):
            writer.content(scan.rest())

    return ReasoningFormat(read, (*starts, *ends, *(frame or ()), *((or_before,) if or_before else ())), starts, ends)


def _skip_and_settle(scan: Scanner) -> Steps[None]:
    yield from scan.skip_space()
    scan.settle()
