"""Reasoning at the beginning of an answer, between two markers."""

from __future__ import annotations

from functools import lru_cache

from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat
from quire.services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

Frame = tuple[str, str]


def delimited(
    starts: str | tuple[str, ...], ends: str | tuple[str, ...], *, frame: Frame | None = None
) -> ReasoningFormat:
    """A start that stands elsewhere is content: an answer may talk about it. A call ends reasoning as well.

    `frame`: markup around the content."""
    starts = (starts,) if isinstance(starts, str) else starts
    ends = (ends,) if isinstance(ends, str) else ends
    frame_end = Markers(frame[1]) if frame else None

    def read(scan: Scanner, writer: EventWriter, is_open: bool, calls: CallProbe) -> Steps[None]:
        yield from scan.skip_space()
        if (yield from scan.try_text(*starts)) or is_open:
            yield from _skip_and_settle(scan)
            yield from _reasoning(scan, writer, _markers(ends, calls.starts), calls)
            yield from _skip_and_settle(scan)
        if frame and frame_end and (yield from scan.try_text(frame[0])):
            yield from _skip_and_settle(scan)
            yield from scan.until(frame_end, writer.content)
            yield from _skip_and_settle(scan)
        writer.no_markup()
        while (yield from scan.peek()):
            writer.content(scan.rest())

    return ReasoningFormat(read, (*starts, *ends, *(frame or ())), starts, ends)


@lru_cache(64)
def _markers(ends: tuple[str, ...], call_starts: tuple[str, ...]) -> Markers:
    return Markers(*ends, *call_starts)


def _reasoning(scan: Scanner, writer: EventWriter, markers: Markers, calls: CallProbe) -> Steps[None]:
    """Up to the end marker, which is read, or to a call, which is not.

    What a probe has read is looked through for the end of reasoning once more, but not for calls, so that each
    character is read twice at most.
    """
    probed = 0
    while (found := (yield from scan.until(markers, writer.reasoning))) in calls.starts:
        after = scan.at
        if (begin := after - len(found)) >= probed:
            if (yield from calls.begins_call(scan, begin)):
                scan.at = begin
                return
            probed, scan.at = scan.at, after
        writer.reasoning(scan.unsettled)


def _skip_and_settle(scan: Scanner) -> Steps[None]:
    yield from scan.skip_space()
    scan.settle()
