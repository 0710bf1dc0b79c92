"""Keeps markup that belongs to no call out of the content."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from quire.services.frontend.output_processor.parsing.events import Content, Event
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter


class ContentFilter:
    """Drops markers, and the white space in front of them, from content; a call between two pieces parts them."""

    __slots__ = ("_markers", "_num_left", "_reader")

    def __init__(self, markers: Markers, at_most: int = sys.maxsize) -> None:
        """`at_most`: how many are dropped; later ones stay."""
        self._markers = markers
        self._num_left = at_most
        self._reader = MarkupReader(self._read)

    def push(self, events: Iterable[Event]) -> list[Event]:
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                kept += self._reader.push(event.text)
            else:
                kept += self.finish()
                kept.append(event)
        return kept

    def finish(self) -> list[Event]:
        reader, self._reader = self._reader, MarkupReader(self._read)
        return reader.finish()

    def _read(self, scan: Scanner, writer: EventWriter) -> Steps[None]:
        while self._num_left and (yield from scan.read_until(self._markers, writer.content)):
            self._num_left -= 1
            if scan.at_start:
                yield from scan.skip_space()
            scan.commit()
        while (yield from scan.peek()):
            writer.content(scan.take_rest())
