"""Driver of one format over one text."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.frontend.output_processor.parsing.events import Event
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.writer import EventWriter

Read = Callable[[Scanner, EventWriter], Steps[None]]


class MarkupReader:
    """Incremental reader: `push` the text in pieces, `finish` once. The events do not depend on the split."""

    __slots__ = ("_scan", "_steps", "_writer")

    def __init__(self, read: Read, is_tool: Callable[[str], bool] = bool) -> None:
        """Starts a reading without any text yet.

        `is_tool`: whether a call of that name may be announced.
        """
        self._scan = Scanner()
        self._writer = EventWriter(self._scan, is_tool)
        self._steps = read(self._scan, self._writer)

    def push(self, text: str) -> list[Event]:
        self._scan.feed(text)
        next(self._steps, None)
        return self._writer.take_events()

    def finish(self) -> list[Event]:
        """Ends the text, lets the format read what it held, and returns the last events."""
        self._scan.end()
        next(self._steps, None)
        self._writer.finish()
        return self._writer.take_events()
