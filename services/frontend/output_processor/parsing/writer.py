"""Writer that formats send their events to."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter

NO_ARGUMENTS = "{}"

Text = type[Content] | type[Reasoning] | type[CallArguments]


class EventWriter:
    """Collector of events; every write commits the text read so far.

    A call is announced with the first value of its arguments, or when it ends without any; before that its text may
    still become content.
    """

    __slots__ = ("_call", "_events", "_is_tool", "_kind", "_pending", "_scan", "_texts", "num_calls")

    def __init__(self, scan: Scanner, is_tool: Callable[[str], bool] = bool) -> None:
        """Creates a writer without events.

        `is_tool`: whether a call of that name may be announced.
        """
        self._is_tool = is_tool
        self._scan = scan
        self._events: list[Event] = []
        self._kind: Text = Content  # type of the text in _texts
        self._texts: list[str] = []  # written last and not yet an event: arguments come in very many pieces
        self._call: ArgumentsWriter | None = None  # the arguments of the call that has not ended
        self._pending: CallStart | None = None  # the same call before it is announced
        self.num_calls = 0  # calls announced so far

    def content(self, text: str) -> None:
        self.abort_call()
        self._scan.commit()
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._scan.commit()
        self._add(Reasoning, text)

    def start_call(self, name: str, call_id: str = "") -> ArgumentsWriter:
        """Starts a call; raises Malformed if no tool of that name is on offer.

        Names are sent to clients as UTF-8, which cannot encode lone surrogates.
        """
        self.abort_call()
        name = name.strip()
        if not self._is_tool(name):
            raise Malformed
        self._pending = CallStart(name.encode("utf-8", "replace").decode(), call_id)
        self._call = ArgumentsWriter(self.arguments)
        return self._call

    @property
    def in_call(self) -> bool:
        """Whether a call has been announced and has not ended."""
        return self._call is not None and self._pending is None

    def end_call(self) -> None:
        """Ends a call that was read completely: its JSON is closed, {} is written if it has no arguments, and the
        text is committed."""
        if self._call is not None and not self._call.finish() and self._pending is not None:
            self.arguments(NO_ARGUMENTS)
        self._call = None
        self._scan.commit()

    def abort_call(self) -> bool:
        """Ends a call that is malformed: closes an announced one and discards any other.

        Returns whether a call was started; its text stays uncommitted.
        """
        call, self._call = self._call, None
        if call is not None and not self._pending:
            committed = self._scan.committed
            call.finish()
            self._scan.committed = committed
        self._pending = None
        return call is not None

    def flush_as_content(self) -> None:
        """Writes the text read since the last commit as content."""
        self.abort_call()
        if text := self._scan.uncommitted:
            self.content(text)

    def drop_markup(self) -> None:
        """Discards the uncommitted text, which is only markup of a malformed call."""

    def finish(self) -> None:
        self.abort_call()

    def announce(self, call: CallStart) -> None:
        self._end_text()
        self._events.append(call)
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Writes JSON text of the last started call, which is announced only now, and commits the text: the call can
        no longer turn into content."""
        if self._pending is not None:
            self.announce(self._pending)
            self._pending = None
        self._scan.commit()
        self._add(CallArguments, text)

    def _add(self, kind: Text, text: str) -> None:
        """Adds text of one kind; text of another kind is turned into an event first."""
        if kind is not self._kind:
            self._end_text()
            self._kind = kind
        self._texts.append(text)

    def _end_text(self) -> None:
        if self._texts:
            self._events.append(self._kind("".join(self._texts)))
            self._texts = []

    def take_events(self) -> list[Event]:
        self._end_text()
        events, self._events = self._events, []
        return events
