"""Writes a call's arguments as JSON in pieces that can be closed at any time."""

from __future__ import annotations

from quire.services.frontend.output_processor.parsing.scanner import Sink

CLOSERS = {"{": "}", "[": "]"}
SEPARATOR = ", "


class ArgumentsWriter:
    """One JSON value. Brackets and keys are held until a value follows them, separators until a next item does.

    So whatever has gone out becomes valid JSON by `finish`, and nothing goes out before the first value is there.
    """

    __slots__ = ("_closers", "_has_key", "_held", "_num_out", "_separator", "_sink", "has_begun", "in_string")

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held: list[str] = []
        self._closers: list[str] = []  # of the brackets that are open, the outermost first
        self._num_out = 0  # of these brackets that have gone out
        self._separator = ""  # in front of the next item
        self._has_key = False  # the last text held is a key
        self.in_string = False
        self.has_begun = False  # a piece has gone out

    @property
    def depth(self) -> int:
        return len(self._closers)

    @property
    def in_object(self) -> bool:
        """Whether a key is what comes next."""
        return bool(self._closers) and self._closers[-1] == "}" and not self._has_key

    def begin(self, bracket: str) -> None:
        self._held.append(self._separator + bracket)
        self._closers.append(CLOSERS[bracket])
        self._separator, self._has_key = "", False

    def key(self, escaped: str) -> None:
        """Takes the place of a key without a value."""
        self.drop_key()
        self._held.append(f'{self._separator}"{escaped}": ')
        self._separator, self._has_key = "", True

    def drop_key(self) -> None:
        if self._has_key:
            self._separator = SEPARATOR if self._held.pop().startswith(SEPARATOR) else ""
            self._has_key = False

    def scalar(self, text: str) -> None:
        """A number, true, false, null, or a whole value that is JSON already."""
        self._put(text)
        self._separator = SEPARATOR

    def string_part(self, escaped: str) -> None:
        """More of a string, which begins with its first part and ends with `end_string`."""
        if self.in_string:
            self._sink(escaped)
        else:
            self._put('"' + escaped)
            self.in_string = True

    def end_string(self) -> None:
        if self.in_string:
            self._sink('"')
            self.in_string, self._separator = False, SEPARATOR
        else:
            self.scalar('""')

    def end(self) -> str:
        """Closes the innermost bracket and returns the closing one."""
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
        """Closes brackets up to the innermost that `closer` closes; none if there is no such one."""
        if closer in self._closers:
            while self.end() != closer:
                pass

    def finish(self) -> bool:
        """Closes what has gone out; False if nothing has."""
        if self.has_begun:
            closing = ('"' if self.in_string else "") + "".join(reversed(self._closers[: self._num_out]))
            if closing:
                self._sink(closing)
        return self.has_begun

    def _put(self, text: str) -> None:
        self.has_begun = True
        self._sink("".join(self._held) + self._separator + text)
        self._held = []
        self._has_key = False
        self._num_out = len(self._closers)
