"""Scanner over text that arrives in pieces, which reads it as if all of it were there.

Formats are generators over a Scanner: they yield where they need a character that has not arrived. No result depends on
how the text was split.

`at` is the read position. Text before `committed` has been handed out or was markup. Text between the two has been read
but may still turn out not to be markup; then it is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reading that pauses, by yielding, until more text arrives or the text ends."""

Sink = Callable[[str], None]

WHITE = " \t\r\n"
SPACE = re.compile(f"[{WHITE}]+")


class Malformed(Exception):
    """Text that does not match its format."""


LONGEST_PADDING = 64  # characters: stuck models write endless white space, which must not accumulate here


def white_space(text: str, start: int, end: int) -> int:
    """Padding function: returns where the white space before `end` begins."""
    begin = max(start, end - LONGEST_PADDING)
    return begin + len(text[begin:end].rstrip(WHITE))


def one_newline(text: str, start: int, end: int) -> int:
    """Padding function for markers after text in which white space is significant: at most one line break."""
    return end - text.endswith("\n", start, end)


Padding = Callable[[str, int, int], int]
"""Returns where in text[start:end] the padding of a marker at `end`, or of one that may follow, begins."""


class Markers:
    """Set of texts to search for; none is part of another, so that the first complete match also begins first."""

    def __init__(self, *texts: str, padding: Padding = white_space) -> None:
        """Compiles the search for the texts.

        `padding`: returns where in text[start:end] the padding of a marker at `end` begins.
        """
        assert not any(a in b for a in texts for b in texts if a is not b), texts
        self.find = re.compile("|".join(map(re.escape, texts)))
        self.padding = padding
        prefixes = {text[:size] for text in texts for size in range(1, len(text))}
        self._partial = re.compile(f"(?:{'|'.join(map(re.escape, sorted(prefixes, key=len, reverse=True)))})\\Z")
        self._longest = max(map(len, texts))

    def undecided(self, text: str, start: int) -> int:
        """Returns the position from which text[start:], which holds no marker, may be a marker's beginning or
        padding."""
        partial = self._partial.search(text, max(start, len(text) - self._longest + 1))
        return self.padding(text, start, partial.start() if partial else len(text))


class Scanner:
    """Text from `committed` on. Positions count from the beginning of the whole text, so that they stay valid."""

    __slots__ = ("_dropped", "_ended", "_text", "at", "committed", "marker_at")

    def __init__(self) -> None:
        self._text = ""
        self._dropped = 0  # number of characters removed before _text
        self._ended = False
        self.at = 0
        self.committed = 0
        self.marker_at = 0  # where the marker that `read_until` found last begins, padding included

    def feed(self, text: str) -> None:
        self._text = self._text[self.committed - self._dropped :] + text
        self._dropped = self.committed

    def end(self) -> None:
        """Marks the text as complete."""
        self._ended = True

    @property
    def at_start(self) -> bool:
        """Whether nothing has been committed yet."""
        return not self.committed

    def commit(self) -> None:
        self.committed = self.at

    @property
    def uncommitted(self) -> str:
        return self._text[self.committed - self._dropped : self._here]

    @property
    def has_ended(self) -> bool:
        """Whether all of the text has arrived."""
        return self._ended

    @property
    def character(self) -> str:
        """Next character; empty if it has not arrived, or at the end."""
        offset = self.at - self._dropped
        return self._text[offset] if offset < len(self._text) else ""

    @property
    def at_end(self) -> bool:
        """Whether all of the text has arrived and has been read."""
        return self._ended and self._here == len(self._text)

    @property
    def marker(self) -> str:
        """Marker that `read_until` found last, with the padding before it."""
        return self._text[self.marker_at - self._dropped : self._here]

    @property
    def _here(self) -> int:
        return self.at - self._dropped

    def peek(self) -> Steps[str]:
        """Waits for the next character and returns it without reading it; empty at the end of the text."""
        while self._here == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._here]

    def next(self) -> Steps[str]:
        """Reads the next character; raises Malformed at the end."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self.at += 1
        return character

    def take_run(self, run: re.Pattern[str]) -> str:
        """Reads and returns the part of a run of matching characters that has arrived; "" if there is none. Never
        waits."""
        match = run.match(self._text, self._here)
        if match is None:
            return ""
        self.at += len(match[0])
        return match[0]

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Reads a match of a pattern in the available text; the pattern must not depend on what follows."""
        match = pattern.match(self._text, self._here)
        if match is not None:
            self.at += len(match[0])
        return match

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Returns whether the available text begins with the pattern; reads nothing."""
        return pattern.match(self._text, self.at - self._dropped) is not None

    def read_run(self, run: re.Pattern[str], at_most: int) -> Steps[str]:
        """Reads a run of characters of one class; raises Malformed if it is longer than `at_most`."""
        parts: list[str] = []
        keep = self.bounded_sink(parts, at_most)
        while (yield from self.peek()) and (part := self.take_run(run)):
            keep(part)
        return "".join(parts)

    def bounded_sink(self, parts: list[str], at_most: int) -> Sink:
        """Returns a sink that collects at most `at_most` characters in `parts`.

        It raises Malformed beyond that; the read position is then right after the first excess character, however many
        arrived at once.
        """

        def keep(part: str) -> None:
            """Keeps a part; raises Malformed beyond `at_most` characters, with the position at the first excess one."""
            parts.append(part)
            excess = sum(map(len, parts)) - at_most
            if excess > 0:
                self.at -= excess - 1
                raise Malformed

        return keep

    def take_rest(self) -> str:
        """Reads all available text."""
        text = self._text[self._here :]
        self.at += len(text)
        return text

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()) and self.take_run(SPACE):
            pass

    def try_text(self, *options: str) -> Steps[str]:
        """Reads the one of `options` that comes next; empty, and nothing read, if none does. No option is a prefix of
        another."""
        longest = max(map(len, options))
        while True:
            text = self._text[self._here : self._here + longest]
            for option in options:
                if text.startswith(option):
                    self.at += len(option)
                    return option
            if self._ended or not any(option.startswith(text) for option in options):
                return ""
            yield

    def expect(self, *options: str) -> Steps[str]:
        """Reads like `try_text`, and raises Malformed if no option follows. A partial option at the end of the text is
        read."""
        found = yield from self.try_text(*options)
        if not found:
            rest = self._text[self._here :] if self._ended else ""
            if any(option.startswith(rest) for option in options):
                self.at += len(rest)
            raise Malformed
        return found

    def next_is(self, *options: str) -> Steps[bool]:
        """Returns whether one of `options` comes next; reads nothing."""
        option = yield from self.try_text(*options)
        self.at -= len(option)
        return bool(option)

    def ends_within(self, *options: str) -> Steps[bool]:
        """Returns whether the text ends here or within one of `options`; that part is then read."""
        comes = yield from self.next_is(*options)
        rest = self._text[self._here :]
        if comes or not self._ended or not any(option.startswith(rest) for option in options):
            return False
        self.at += len(rest)
        return True

    def read_until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Hands out text up to the first marker's padding, and returns the marker, read but not committed, or "" at the
        end."""
        while True:
            match = markers.find.search(self._text, self._here)
            if match is not None:
                self._emit(markers.padding(self._text, self._here, match.start()), sink)
                self.marker_at = self.at
                self.at = self._dropped + match.end()
                return match[0]
            self._emit(len(self._text) if self._ended else markers.undecided(self._text, self._here), sink)
            if self._ended:
                return ""
            yield

    def _emit(self, end: int, sink: Sink) -> None:
        """Moves the position to `end` and gives the text before it, if any, to the sink."""
        text = self._text[self._here : end]
        self.at = self._dropped + end
        if text:
            sink(text)
