"""Where formats write what they find."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from quire.services.frontend.output_processor.parsing.scanner import Malformed, Scanner
from quire.services.frontend.output_processor.parsing.values.arguments_writer import ArgumentsWriter

NO_ARGUMENTS = "{}"

Text = type[Content] | type[Reasoning] | type[CallArguments]


class EventWriter:
    """Whatever is written settles what was read so far. A call is announced with the first value of its arguments, or
    when it ends without any; before that its text may still become content."""

    __slots__ = ("_call", "_events", "_is_tool", "_kind", "_pending", "_scan", "_texts", "num_calls")

    def __init__(self, scan: Scanner, is_tool: Callable[[str], bool] = bool) -> None:
        """`is_tool`: whether a call of that name may be announced."""
        self._is_tool = is_tool
        self._scan = scan
        self._events: list[Event] = []
        self._kind: Text = Content  # of what is in _texts
        self._texts: list[str] = []  # written last, and not yet an event: arguments come in very many pieces
        self._call: ArgumentsWriter | None = None  # of the call that has not ended
        self._pending: CallStart | None = None  # that call, before it is announced
        self.num_calls = 0  # announced

    def content(self, text: str) -> None:
        self.abort_call()
        self._scan.commit()
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._scan.commit()
        self._add(Reasoning, text)

    def start_call(self, name: str, call_id: str = "") -> ArgumentsWriter:
        """Malformed if no tool of that name is on offer. Names go to clients as UTF-8, in which half of a surrogate
        pair cannot be written."""
        self.abort_call()
        name = name.strip()
        if not self._is_tool(name):
            raise Malformed
        self._pending = CallStart(name.encode("utf-8", "replace").decode(), call_id)
        self._call = ArgumentsWriter(self.arguments)
        return self._call

    @property
    def in_call(self) -> bool:
        """Whether a call was announced and has not ended."""
        return self._call is not None and self._pending is None

    def end_call(self) -> None:
        """The call was read to its end."""
        if self._call is not None and not self._call.finish() and self._pending is not None:
            self.arguments(NO_ARGUMENTS)
        self._call = None
        self._scan.commit()

    def abort_call(self) -> bool:
        """Ends a call that is not read on: what was announced is closed, anything else was no call. Returns whether
        there was one on its way; its text stays uncommitted."""
        call, self._call = self._call, None
        if call is not None and not self._pending:
            committed = self._scan.committed
            call.finish()
            self._scan.committed = committed
        self._pending = None
        return call is not None

    def flush_as_content(self) -> None:
        """What was read since the last settling is content after all."""
        self.abort_call()
        if text := self._scan.uncommitted:
            self.content(text)

    def drop_markup(self) -> None:
        """What was read since the last settling is markup alone, of a call that is none."""

    def finish(self) -> None:
        self.abort_call()

    def announce(self, call: CallStart) -> None:
        self._end_text()
        self._events.append(call)
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """JSON text of the call that was started last."""
        if self._pending is not None:
            self.announce(self._pending)
            self._pending = None
        self._scan.commit()
        self._add(CallArguments, text)

    def _add(self, kind: Text, text: str) -> None:
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
