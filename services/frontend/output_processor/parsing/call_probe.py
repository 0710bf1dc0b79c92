"""Lookahead that distinguishes calls within open reasoning from reasoning that only mentions their markup."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.frontend.output_processor.parsing.events import CallStart
from quire.services.frontend.output_processor.parsing.scanner import Scanner, Steps
from quire.services.frontend.output_processor.parsing.tool_schemas import ToolSchemas
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter
from quire.services.frontend.output_processor.parsing.writer import EventWriter

ReadCalls = Callable[[Scanner, EventWriter, ToolSchemas], Steps[None]]


class _Decided(Exception):
    """Signal that the text after a marker is, or is not, a call of an offered tool."""

    def __init__(self, is_call: bool) -> None:
        super().__init__()
        self.is_call = is_call


class _DecidingWriter(EventWriter):
    """Writer that stops the reading at the first event."""

    __slots__ = ("_begin", "_schemas")

    def __init__(self, scan: Scanner, schemas: ToolSchemas) -> None:
        super().__init__(scan)
        self._begin = scan.at
        self._schemas = schemas

    def start_call(self, name: str, call_id: str = "") -> ArgumentsWriter:
        if name not in self._schemas:
            raise _Decided(False)
        return super().start_call(name, call_id)

    def announce(self, call: CallStart) -> None:
        raise _Decided(True)

    def content(self, text: str) -> None:
        raise _Decided(False)

    def drop_markup(self) -> None:
        raise _Decided(False)

    def flush_as_content(self) -> None:
        if self._scan.at > self._begin:
            raise _Decided(False)


class CallProbe:
    """Lookahead at the markers of calls, one per sample. Without tools there are no markers."""

    def __init__(
        self, read: ReadCalls | None = None, starts: tuple[str, ...] = (), schemas: ToolSchemas | None = None
    ) -> None:
        """Sets up the lookahead for calls in one tool format, given by its reader, its start markers and the offered
        tools; without a reader no call is ever found."""
        self._read = read
        self._schemas = schemas or ToolSchemas()
        self.starts = starts if read is not None else ()
        self.has_found = False  # a call has ended the reasoning

    def begins_call(self, scan: Scanner, begin: int) -> Steps[bool]:
        """Returns whether a call of an offered tool begins at `begin`; reads as far as that takes and commits
        nothing."""
        assert self._read is not None
        scan.at, committed = begin, scan.committed
        try:
            yield from self._read(scan, _DecidingWriter(scan, self._schemas), self._schemas)
        except _Decided as decided:
            self.has_found = decided.is_call
        scan.committed = committed
        return self.has_found
