"""Reader of text with calls that begin with markers, shared by all formats with markers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

NOTHING = re.compile(r"(?!)")
REST_OF_TAG = re.compile(r"[^<>\n]+")
LONGEST_TAG = 300  # characters
SURPLUS = ("}", "]")  # brackets that models add after a call


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """Markers around a format's calls."""

    starts: tuple[str, ...]  # markers that begin one or more calls
    ends: tuple[str, ...] = ()  # one of these ends them
    inner_starts: tuple[str, ...] = ()  # markers that begin further calls before an end
    inner_ends: tuple[str, ...] = ()  # end markers within a call, which a broken call may leave over
    openers: tuple[str, ...] = ()  # beginnings of tags within a call, which a broken call may leave over
    stray_markup: re.Pattern[str] = NOTHING  # other markup within a call
    start_markers: Markers = field(init=False)
    all_markers: Markers = field(init=False)  # used while end markers of a broken call may still come
    inner_markers: Markers = field(init=False)  # used after a start marker that was only mentioned

    def __post_init__(self) -> None:
        object.__setattr__(self, "start_markers", Markers(*self.starts))
        object.__setattr__(self, "inner_markers", Markers(*self.starts, *self.inner_ends, *self.openers))
        object.__setattr__(self, "all_markers", Markers(*self.starts, *self.inside))

    @property
    def inside(self) -> tuple[str, ...]:
        """Returns the markers that occur only within calls."""
        return (*self.ends, *self.inner_ends, *self.openers)

    def without_stray_markup(self, text: str) -> str:
        """Returns the text of a broken call without its markup."""
        return self.all_markers.find.sub("", self.stray_markup.sub("", text))


def merged(markups: Sequence[CallMarkup]) -> CallMarkup:
    """Returns the markup of texts in which any of several spellings may occur."""
    if len(markups) == 1:
        return markups[0]

    def every(part: Callable[[CallMarkup], tuple[str, ...]]) -> tuple[str, ...]:
        return tuple(dict.fromkeys(text for markup in markups for text in part(markup)))

    stray = re.compile("|".join(markup.stray_markup.pattern for markup in markups))
    return CallMarkup(
        every(lambda markup: markup.starts),
        every(lambda markup: markup.ends),
        every(lambda markup: markup.inner_starts),
        every(lambda markup: markup.inner_ends),
        every(lambda markup: markup.openers),
        stray,
    )


def call_blocks(
    scan: Scanner, writer: EventWriter, markup: CallMarkup, calls: Callable[[str], Steps[None]]
) -> Steps[None]:
    """Reads a text with content and calls.

    `calls` reads calls from after a start marker, which it gets, up to an end marker. The end markers that belong to a
    broken call are left out of the content.
    """
    markers = markup.start_markers
    while marker := (yield from scan.read_until(markers, writer.content)):
        if marker not in markup.starts:
            yield from _rest_of_tag(scan, marker, markup)
            scan.commit()
            continue
        markers, before = markup.start_markers, writer.num_calls
        try:
            yield from calls(marker)
        except Malformed:
            is_inside = bool(markup.inside) and (yield from scan.next_is(*markup.inside))
            is_mention = reject_call(scan, writer, markup, marker, called=is_inside or writer.num_calls > before)
            markers = markup.inner_markers if is_mention else markup.all_markers
        called = writer.num_calls > before
        if not (
            yield from read_call_end(scan, writer, markup.ends, (*markup.starts, *markup.inner_starts), called=called)
        ):
            markers = markup.all_markers


def _rest_of_tag(scan: Scanner, marker: str, markup: CallMarkup) -> Steps[None]:
    """Consumes the attributes and the > of an opening marker; nothing is consumed if they do not fit."""
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
    """Ends the reading of a call that is malformed, and returns whether its start was merely mentioned.

    If the call was announced, or is cut off by the end of the text, its unsent part is dropped. A mere mention of the
    start is content (at the end of the text only where no call came before). Any other malformed text is content
    without its markup.

    `called`: a call was announced since `start`, or markup follows that occurs only in calls.
    """
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
    """Reads the end marker after calls, with the white space and surplus brackets before it; returns False if other
    text follows.

    The text may also end before the marker, within it, or within one of `starts`.
    """
    if not called:
        return True
    yield from scan.skip_space()
    begin = scan.at
    while ends and (yield from scan.try_text(*SURPLUS)):
        yield from scan.skip_space()
    if not ends:
        if starts:
            yield from scan.ends_within(*starts)
    elif not (yield from scan.try_text(*ends)) and not (yield from scan.ends_within(*ends, *starts)):
        scan.at = begin
        writer.flush_as_content()
        return False
    yield from scan.skip_space()
    while ends and (yield from scan.try_text(*ends)):  # models repeat it
        yield from scan.skip_space()
    scan.commit()
    return True
