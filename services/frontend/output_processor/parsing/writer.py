"""Where formats write what they find."""

from __future__ import annotations

from services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from services.frontend.output_processor.parsing.scanner import Scanner

NO_ARGUMENTS = "{}"

Text = type[Content] | type[Reasoning] | type[CallArguments]


class EventWriter:
    """Whatever is written settles what was read so far."""

    __slots__ = ("_bare", "_events", "_kind", "_scan", "_texts", "num_calls")

    def __init__(self, scan: Scanner) -> None:
        self._scan = scan
        self._events: list[Event] = []
        self._kind: Text = Content  # of what is in _texts
        self._texts: list[str] = []  # written last, and not yet an event: arguments come in very many pieces
        self._bare = False  # the last call has no arguments yet
        self.num_calls = 0

    def content(self, text: str) -> None:
        self._end_call()
        self._add(Content, text)

    def reasoning(self, text: str) -> None:
        self._end_call()
        self._add(Reasoning, text)

    def start(self, name: str, call_id: str = "") -> None:
        """Names go to clients as UTF-8, in which half of a surrogate pair cannot be written."""
        self._end_call()
        self._end_text()
        self._events.append(CallStart(name.encode("utf-8", "replace").decode(), call_id))
        self._scan.settle()
        self.num_calls += 1
        self._bare = True

    def arguments(self, text: str) -> None:
        """Of the call that was started last."""
        self._add(CallArguments, text)
        self._bare = False

    def no_markup(self) -> None:
        """What was read since the last settling is content after all."""
        if text := self._scan.unsettled:
            self.content(text)

    def finish(self) -> None:
        self._end_call()

    def _end_call(self) -> None:
        if self._bare:
            self.arguments(NO_ARGUMENTS)

    def _add(self, kind: Text, text: str) -> None:
        self._scan.settle()
        if kind is not self._kind:
            self._end_text()
            self._kind = kind
        self._texts.append(text)

    def _end_text(self) -> None:
        if self._texts:
            self._events.append(self._kind("".join(self._texts)))
            self._texts = []

    def take(self) -> list[Event]:
        self._end_text()
        events, self._events = self._events, []
        return events
