"""Text with calls in it that begin with markers: what all formats with markers have in common."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

NOTHING = re.compile(r"(?!)")
REST_OF_TAG = re.compile(r"[^<>\n]+")
LONGEST_TAG = 300  # characters


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """The texts around a format's calls."""

    starts: tuple[str, ...]  # what a call, or several, begin with
    ends: tuple[str, ...] = ()  # one of these follows
    inner_starts: tuple[str, ...] = ()  # what further calls begin with before an end
    inner_ends: tuple[str, ...] = ()  # end markers within, which a broken call may leave behind
    openers: tuple[str, ...] = ()  # what tags within begin with, which a broken call may leave behind as well
    stray_markup: re.Pattern[str] = NOTHING  # other markup within
    start_markers: Markers = field(init=False)
    all_markers: Markers = field(init=False)  # while ends of a broken call may still come
    inner_markers: Markers = field(init=False)  # after what seems to be a mention of a start

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_markers", Markers(*self.starts))
        object.__setattr__(self, "inner_markers", Markers(*self.starts, *self.inner_ends, *self.openers))
        object.__setattr__(self, "all_markers", Markers(*self.starts, *self.inside))

    @property
    def inside(self) -> tuple[str, ...]:
        """What stands in calls only."""
        return (*self.ends, *self.inner_ends, *self.openers)

    def without_stray_markup(self, text: str) -> str:
        """The text of a broken call without its markup."""
        return self.all_markers.find.sub("", self.stray_markup.sub("", text))


def call_blocks(
    scan: Scanner, writer: EventWriter, markup: CallMarkup, calls: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Content, and calls: `calls` reads them from behind a start, which it gets, up to an end.

    The end markers that belong to a broken call are left out of the content."""
    markers = markup.start_markers
    while found := (yield from scan.read_until(markers, writer.content)):
        if found not in markup.starts:
            yield from _rest_of_tag(scan, found, markup)
            scan.commit()
            continue
        markers, before = markup.start_markers, writer.num_calls
        try:
            yield from calls(found)
        except Malformed:
            is_inside = bool(markup.inside) and (yield from scan.next_is(*markup.inside))
            is_mention = reject_call(scan, writer, markup, found, called=is_inside or writer.num_calls > before)
            markers = markup.inner_markers if is_mention else markup.all_markers
        called = writer.num_calls > before
        if not (
            yield from read_call_end(scan, writer, markup.ends, (*markup.starts, *markup.inner_starts), called=called)
        ):
            markers = markup.all_markers


def _rest_of_tag(scan: Scanner, marker: str, markup: CallMarkup) -> Steps[None]:
    if marker not in markup.openers:
        return
    try:
        yield from scan.read_run(REST_OF_TAG, LONGEST_TAG)
        yield from scan.try_text(">")
    except Malformed:
        return


def reject_call(
    scan: Scanner, writer: EventWriter, markup: CallMarkup | None = None, start: str = "", *, called: bool = False
) -> bool:
    """Ends a reading that has met what it cannot read. Of a call that was announced, and of one that the text's end
    cuts off, what has not gone out is dropped. A mention of the start alone is content (at the end, only where no call
    came before), and so is what else cannot be read, without its markup.

    `called`: a call was announced since `start`, or markup follows that only calls have. Returns whether it was a mere
    mention."""
    if writer.in_call:
        writer.abort_call()
        scan.commit()
        return False
    broken = writer.abort_call() or called
    text = scan.uncommitted
    broken = broken or bool(start and text.partition(start)[2].strip())
    if scan.at_end and (broken or (start and writer.num_calls)):
        scan.commit()
        return True
    if broken and markup is not None:
        text = markup.without_stray_markup(text)
    if text:
        writer.content(text)
    else:
        writer.drop_markup()
    scan.commit()
    return not broken


def read_call_end(
    scan: Scanner, writer: EventWriter, ends: tuple[str, ...], starts: tuple[str, ...] = (), *, called: bool
) -> Steps[bool]:
    """Behind calls: the white space around their end marker belongs to it. The text may also end in front of that, or
    within it, or within one of `starts`. False if there is something else."""
    if not called:
        return True
    yield from scan.skip_space()
    if not ends:
        if starts:
            yield from scan.ends_within(*starts)
    elif not (yield from scan.try_text(*ends)) and not (yield from scan.ends_within(*ends, *starts)):
        writer.flush_as_content()
        return False
    yield from scan.skip_space()
    scan.commit()
    return True
