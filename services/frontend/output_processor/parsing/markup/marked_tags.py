"""Calls written with tags that all begin with a special token, the mark, which never occurs in values."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from quire.services.frontend.output_processor.parsing.markup.call_blocks import CallMarkup, reject_call
from quire.services.frontend.output_processor.parsing.markup.tagged_calls import no_padding
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

LONGEST_TAG = 512  # characters
TEXT = re.compile(r"[^<>\n]+")
ATTRIBUTE = re.compile(r'\s+(\w+)="([^"]*)"')


class Tag(NamedTuple):
    """Holds a parsed opening or closing tag."""

    name: str
    is_end: bool
    attributes: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class MarkedTagSyntax:
    """Syntax of a format's tags."""

    marks: Mapping[str, bool]  # marks that precede a tag, and whether it then ends an element
    opening: str = ""  # text after the mark; models sometimes omit it
    closing: str = ">"
    ends_with_slash: bool = False  # tags that end an element begin with a slash
    names: tuple[str, ...] = ()  # names of all tags; empty: any
    before_text: Markers = field(init=False)
    in_values: Markers = field(init=False)  # for text in which white space before a mark is significant
    markup: CallMarkup = field(init=False)

    def __post_init__(self) -> None:
        """Derives the markers and the pattern of stray markup from the marks and tag names."""
        object.__setattr__(self, "before_text", Markers(*self.marks))
        object.__setattr__(self, "in_values", Markers(*self.marks, padding=no_padding))
        name = rf"(?:{'|'.join(self.names)})\b(?:{ATTRIBUTE.pattern})*" if self.names else TEXT.pattern
        opening = f"(?:{re.escape(self.opening)})?" if self.names else re.escape(self.opening)
        tag = f"(?:{opening}{name}(?:{re.escape(self.closing)})?)?"
        stray_markup = re.compile("|".join(re.escape(mark) + tag for mark in self.marks))
        object.__setattr__(self, "markup", CallMarkup(tuple(self.marks), stray_markup=stray_markup))

    def knows(self, name: str) -> bool:
        return not self.names or name in self.names

    def next_tag(self, scan: Scanner) -> Steps[Tag]:
        """Reads a tag including its mark."""
        yield from scan.skip_space()
        return (yield from self.tag(scan, (yield from scan.expect(*self.marks))))

    def tag(self, scan: Scanner, mark: str) -> Steps[Tag]:
        """Reads a tag from after its mark, with its attributes unescaped; raises Malformed for a tag that has no
        name or does not close."""
        if self.opening:
            yield from scan.try_text(self.opening)
        text = yield from scan.read_run(TEXT, LONGEST_TAG)
        yield from scan.expect(self.closing)
        is_end = self.marks[mark] or (self.ends_with_slash and text.startswith("/"))
        name, _, rest = text.removeprefix("/" if self.ends_with_slash else "").partition(" ")
        if not name:
            raise Malformed
        return Tag(name, is_end, {key: _unescaped(value) for key, value in ATTRIBUTE.findall(f" {rest}")})


def _unescaped(value: str) -> str:
    return value.replace("&quot;", '"').replace("&amp;", "&")


ReadCall = Callable[[Tag], Steps[bool]]
"""Reads a call, or markup around calls, from after a tag; False, and nothing read, if the tag is neither."""


def marked_calls(scan: Scanner, writer: EventWriter, tags: MarkedTagSyntax, call: ReadCall) -> Steps[None]:
    """Reads content and calls. Tags that a broken call leaves over are not content."""
    is_within = False
    while mark := (yield from scan.read_until(tags.before_text, writer.content)):
        before = writer.num_calls
        try:
            tag = yield from tags.tag(scan, mark)
            if not (yield from call(tag)) and not (is_within and tags.knows(tag.name)):
                raise Malformed
            is_within = True
        except Malformed:
            is_mention = reject_call(scan, writer, tags.markup, mark, called=is_within or writer.num_calls > before)
            is_within = is_within or not is_mention
            continue
        yield from scan.skip_space()
        if writer.num_calls > before:
            scan.commit()
