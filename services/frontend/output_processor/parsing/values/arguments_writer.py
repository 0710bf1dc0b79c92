"""Incremental writer of a call's arguments as JSON that can be closed at any time."""

from __future__ import annotations

from quire.services.frontend.output_processor.parsing.scanner import Sink

CLOSERS = {"{": "}", "[": "]"}
SEPARATOR = ", "


class ArgumentsWriter:
    """Writer of one JSON value. Brackets and keys are held until a value follows, separators until the next item.

    Text that has been emitted therefore becomes valid JSON by `finish`, and nothing is emitted before the first value.
    """

    __slots__ = ("_closers", "_has_key", "_held", "_num_out", "_separator", "_sink", "has_begun", "in_string")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held: list[str] = []
        self._closers: list[str] = []  # closing brackets of the open ones, the outermost first
        self._num_out = 0  # number of them that have been emitted
        self._separator = ""  # written before the next item
        self._has_key = False  # the last held text is a key
        self.in_string = False
        self.has_begun = False  # something has been emitted

    @property
    def depth(self) -> int:
        return len(self._closers)

    @property
    def in_object(self) -> bool:
        """Whether a key comes next."""
        return bool(self._closers) and self._closers[-1] == "}" and not self._has_key

    def open(self, bracket: str) -> None:
        self._held.append(self._separator + bracket)
        self._closers.append(CLOSERS[bracket])
        self._separator, self._has_key = "", False

    def key(self, escaped: str) -> None:
        """Writes a key; replaces a preceding key without a value."""
        self.drop_key()
        self._held.append(f'{self._separator}"{escaped}": ')
        self._separator, self._has_key = "", True

    def drop_key(self) -> None:
        if self._has_key:
            self._separator = SEPARATOR if self._held.pop().startswith(SEPARATOR) else ""
            self._has_key = False

    def scalar(self, text: str) -> None:
        """Writes a number, true, false, null, or a complete JSON value."""
        self._put(text)
        self._separator = SEPARATOR

    def string_part(self, escaped: str) -> None:
        """Writes a part of a string, which begins with its first part and ends with `end_string`."""
        if self.in_string:
            self._sink(escaped)
        else:
            self._put('"' + escaped)
            self.in_string = True

    def end_string(self) -> None:
        """Closes the open string; an empty string is written if none is open."""
        if self.in_string:
            self._sink('"')
            self.in_string, self._separator = False, SEPARATOR
        else:
            self.scalar('""')

    def end(self) -> str:
        """Drops a key without value, closes the innermost bracket and returns the closing one."""
        self.drop_key()
        closer = self._closers.pop()
        self._separator = ""
        if len(self._closers) < self._num_out:
            self._sink(closer)
            self._num_out -= 1
        else:
            self._put(closer)
        self._separator = SEPARATOR
        return closer

    def end_up_to(self, closer: str) -> None:
        """Closes brackets up to the innermost one that `closer` closes, if any."""
        if closer in self._closers:
            while self.end() != closer:
                pass

    def finish(self) -> bool:
        """Closes an open string and all emitted brackets, so that the JSON is valid; returns False if nothing was
        emitted."""
        if self.has_begun:
            closing = ('"' if self.in_string else "") + "".join(reversed(self._closers[: self._num_out]))
            if closing:
                self._sink(closing)
        return self.has_begun

    def _put(self, text: str) -> None:
        """Writes `text` after the brackets and keys that were held until a value follows."""
        self.has_begun = True
        self._sink("".join(self._held) + self._separator + text)
        self._held = []
        self._has_key = False
        self._num_out = len(self._closers)
