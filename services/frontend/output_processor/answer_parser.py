"""Parser that splits an answer's text into reasoning, content and tool calls with their numbers and ids."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.services.frontend.output_processor.parsing.call_probe import CallProbe
from quire.services.frontend.output_processor.parsing.content_filter import ContentFilter
from quire.services.frontend.output_processor.parsing.events import CallArguments, CallStart, Content, Event, Reasoning
from quire.services.frontend.output_processor.parsing.reader import MarkupReader
from quire.services.frontend.output_processor.parsing.scanner import Markers


class CallDelta(NamedTuple):
    """New part of one tool call."""

    number: int  # counts from 0 in the order of the answer
    id: str  # only in a call's first delta, like the name
    name: str
    arguments: str  # a piece of JSON text


Part = Content | Reasoning | CallDelta


def append_part(parts: list[Part], part: Part) -> None:
    """Appends `part`, or joins it to the last part where that is of the same kind and call."""
    last = parts[-1] if parts else None
    if isinstance(part, CallDelta):
        if isinstance(last, CallDelta) and not part.id:
            parts[-1] = last._replace(arguments=last.arguments + part.arguments)
            return
    elif type(last) is type(part):
        parts[-1] = type(part)(last.text + part.text)
        return
    parts.append(part)


class AnswerParser:
    """Parser of one sample's text. The joined parts do not depend on how the text was split."""

    __slots__ = (
        "_ends",
        "_filter",
        "_hidden",
        "_most_calls",
        "_new_id",
        "_num_calls",
        "_probe",
        "_reasoning",
        "_tools",
        "_wants_reasoning",
        "has_reasoned",
    )

    def __init__(
        self,
        reasoning: MarkupReader | None,
        tools: MarkupReader | None,
        *,
        new_id: Callable[[int, str], str],
        most_calls: int | None,
        wants_reasoning: bool,
        probe: CallProbe | None = None,
        reasoning_ends: tuple[str, ...] = (),
        hidden: Markers | None = None,
    ) -> None:
        """Wires the readers of reasoning and tools.

        `most_calls`: maximum number of calls; everything after them is dropped. `probe`: the one that `reasoning` reads
        with; after it has found a call, one of `reasoning_ends` may follow that ends nothing. `hidden`: special tokens,
        which are never content.
        """
        self._reasoning = reasoning
        self._tools = tools
        self._new_id = new_id
        self._most_calls = most_calls
        self._wants_reasoning = wants_reasoning
        self._probe = probe
        self._ends = reasoning_ends
        self._filter: ContentFilter | None = None
        self._hidden = None if hidden is None else ContentFilter(hidden)
        self._num_calls = 0
        self.has_reasoned = False

    def push(self, text: str) -> list[Part]:
        """Parses the next piece of text and returns the parts that are certain; the rest is held until more text
        arrives."""
        if not text:
            return []
        events = [Content(text)] if self._reasoning is None else self._reasoning.push(text)
        return self._parts(self._with_calls(events))

    def finish(self) -> list[Part]:
        """Returns the parts that were held; an unfinished call is closed, so that its arguments are valid JSON."""
        events = [] if self._reasoning is None else self._reasoning.finish()
        events = self._with_calls(events)
        if self._tools is not None:
            events += self._filtered(self._tools.finish())
        if self._filter is not None:
            events += self._filter.finish()
        parts = self._parts(events)
        for event in [] if self._hidden is None else self._hidden.finish():
            self._add(parts, event)
        return parts

    def _with_calls(self, events: list[Event] | list[Content]) -> list[Event]:
        """Passes content on to the tool parser, and other events through."""
        with_calls: list[Event] = []
        for event in events:
            if isinstance(event, Content) and self._tools is not None:
                with_calls += self._filtered(self._tools.push(event.text))
            else:
                with_calls.append(event)
        return with_calls

    def _filtered(self, events: list[Event]) -> list[Event]:
        """Drops the end marker of reasoning where a call has ended the reasoning before."""
        if self._filter is None and self._probe is not None and self._probe.has_found and self._ends:
            self._filter = ContentFilter(Markers(*self._ends), at_most=1)
        return events if self._filter is None else self._filter.push(events)

    def _parts(self, events: list[Event]) -> list[Part]:
        """Converts events to parts, less hidden markers, and merges neighbours of the same kind."""
        parts: list[Part] = []
        for event in events if self._hidden is None else self._hidden.push(events):
            self._add(parts, event)
        return parts

    @property
    def has_called(self) -> bool:
        return self._num_calls > 0

    def _add(self, parts: list[Part], event: Event) -> None:
        """Adds an event to the parts. Calls get numbers and ids; calls beyond the most that are allowed are dropped."""
        if isinstance(event, CallStart):
            call_id = event.id or self._new_id(self._num_calls, event.name)
            self._num_calls += 1
            piece = CallDelta(self._num_calls - 1, call_id, event.name, "")
            if self._most_calls is None or piece.number < self._most_calls:
                parts.append(piece)
        elif isinstance(event, CallArguments):
            self._add_arguments(parts, event.text)
        elif event.text and self._wants(event):
            append_part(parts, event)

    def _add_arguments(self, parts: list[Part], text: str) -> None:
        """Adds a piece of the last call's arguments, unless that call is beyond the most that are allowed."""
        if self._most_calls is None or self._num_calls <= self._most_calls:
            append_part(parts, CallDelta(self._num_calls - 1, "", "", text))

    def _wants(self, event: Content | Reasoning) -> bool:
        """Returns whether a text is sent: reasoning if requested, content until the last allowed call. Records that
        reasoning occurred."""
        if isinstance(event, Reasoning):
            self.has_reasoned = True
            return self._wants_reasoning
        return self._most_calls is None or self._num_calls < self._most_calls
