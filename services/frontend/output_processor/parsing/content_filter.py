"""Filter that removes markup from the content."""

from __future__ import annotations

import sys
from collections.abc import Iterable

from quire.services.frontend.output_processor.parsing.events import Content, Event
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.scanner import Markers, Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter


class ContentFilter:
    """Filter that drops markers, and the white space before them, from content. A call between two contents separates
    them."""

    __slots__ = ("_markers", "_num_left", "_reader")

    def __init__(self, markers: Markers, at_most: int = sys.maxsize) -> None:
        """Creates a filter for the markers.

        `at_most`: number of markers that are dropped; later ones stay.
        """
        self._markers = markers
        self._num_left = at_most
        self._reader = MarkupReader(self._read)

    def push(self, events: Iterable[Event]) -> list[Event]:
        """Removes markup from the content events. Every other event first ends the content, so that the order is
        kept."""
        kept: list[Event] = []
        for event in events:
            if isinstance(event, Content):
                kept += self._reader.push(event.text)
            else:
                kept += self.finish()
                kept.append(event)
        return kept

    def finish(self) -> list[Event]:
        """Returns the content that was held, and starts a new reader for the text that follows."""
        reader, self._reader = self._reader, MarkupReader(self._read)
        return reader.finish()

    def _read(self, scan: Scanner, writer: EventWriter) -> Steps[None]:
        """Removes up to `_num_left` markers, with the space after one at the start of the text, and writes the rest
        as content."""
        while self._num_left and (yield from scan.read_until(self._markers, writer.content)):
            self._num_left -= 1
            if scan.at_start:
                yield from scan.skip_space()
            scan.commit()
        while (yield from scan.peek()):
            writer.content(scan.take_rest())
