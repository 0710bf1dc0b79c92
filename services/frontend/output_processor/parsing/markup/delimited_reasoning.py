"""Reasoning at the beginning of an answer, between two markers."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.formats import ReasoningFormat
from quire.services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter


@dataclass(frozen=True, slots=True)
class ReasoningFrame:
    """Markup around the content."""

    starts: tuple[str, ...]  # alternatives, one of which occurs
    end: str
    may_be_open: bool = False  # the end marker is markup also without a start, which the prompt may contain
    after: str = ""  # text that may follow the end marker and is not content
    end_marker: Markers = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "end_marker", Markers(self.end))


def simple_frame(start: str, end: str) -> ReasoningFrame:
    return ReasoningFrame((start,), end)


def delimited_format(
    starts: str | tuple[str, ...],
    ends: str | tuple[str, ...],
    *,
    frame: ReasoningFrame | None = None,
    end_alone: bool = False,
) -> ReasoningFormat:
    """Returns the format of reasoning between `starts` and `ends`. A call ends reasoning as well.

    A start marker elsewhere in the answer is content: an answer may mention it. `end_alone`: models begin answers
    without reasoning with the end marker.
    """
    starts = (starts,) if isinstance(starts, str) else starts
    ends = (ends,) if isinstance(ends, str) else ends

    def read(scan: Scanner, writer: EventWriter, is_open: bool, calls: CallProbe) -> Steps[None]:
        """Reads reasoning at the answer's beginning (already open if `is_open`), then an optional frame; all after
        is content."""
        yield from scan.skip_space()
        if (yield from scan.try_text(*starts)) or is_open:
            yield from _skip_space_and_commit(scan)
            yield from _reasoning(scan, writer, _markers(ends, calls.starts), calls)
            yield from _skip_space_and_commit(scan)
        elif end_alone and (yield from scan.try_text(*ends)):
            yield from _skip_space_and_commit(scan)
        if frame is not None:
            yield from _framed(scan, writer, frame)
        writer.flush_as_content()
        while (yield from scan.peek()):
            writer.content(scan.take_rest())

    tokens = (*starts, *ends) if frame is None else (*starts, *ends, *frame.starts, frame.end)
    return ReasoningFormat(read, tokens, starts, ends)


def _framed(scan: Scanner, writer: EventWriter, frame: ReasoningFrame) -> Steps[None]:
    """Reads the frame around the content, up to its end marker and the text after it; nothing if the frame is not
    there and cannot be open."""
    if frame.starts and (yield from scan.try_text(*frame.starts)):
        yield from _skip_space_and_commit(scan)
    elif not frame.may_be_open:
        return
    writer.flush_as_content()
    yield from scan.read_until(frame.end_marker, writer.content)
    yield from _skip_space_and_commit(scan)
    if frame.after and (yield from scan.try_text(frame.after)):
        scan.commit()


@lru_cache(64)
def _markers(ends: tuple[str, ...], call_starts: tuple[str, ...]) -> Markers:
    return Markers(*ends, *call_starts)


def _reasoning(scan: Scanner, writer: EventWriter, markers: Markers, calls: CallProbe) -> Steps[None]:
    """Reads reasoning up to the end marker, which is consumed, or to a call, which is not.

    Text that a probe has read is searched for the end of reasoning once more, but not for calls, so that each character
    is read twice at most.
    """
    probed = 0
    while (found := (yield from scan.read_until(markers, writer.reasoning))) in calls.starts:
        after = scan.at
        if (begin := after - len(found)) >= probed:
            if (yield from calls.begins_call(scan, begin)):
                scan.at = begin
                return
            probed, scan.at = scan.at, after
        writer.reasoning(scan.uncommitted)


def _skip_space_and_commit(scan: Scanner) -> Steps[None]:
    yield from scan.skip_space()
    scan.commit()
