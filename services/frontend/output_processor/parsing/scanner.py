"""Text that comes in pieces, read as if it were there in one.

Formats are generators over a Scanner: where they need a character that has not come, they yield. Nothing that they can
ask depends on where the text was cut, so that what they find does not either.

`at` is where reading goes on. What lies before `committed` is accounted for: handed out, or markup that served its
purpose. What lies between the two has been read but may still turn out to be no markup; then it is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A reading that pauses, by yielding, until more text has come or the end is known."""

Sink = Callable[[str], None]

WHITE = " \t\r\n"
SPACE = re.compile(f"[{WHITE}]+")


class Malformed(Exception):
    """The text is not what its format says."""


LONGEST_PADDING = 64  # characters: models that are stuck write white space without end, which must not pile up here


def white_space(text: str, start: int, end: int) -> int:
    """Padding of markers: where the white space begins that ends at `end`."""
    begin = max(start, end - LONGEST_PADDING)
    return begin + len(text[begin:end].rstrip(WHITE))


def one_newline(text: str, start: int, end: int) -> int:
    """Padding of markers that follow text in which white space counts."""
    return end - text.endswith("\n", start, end)


Padding = Callable[[str, int, int], int]
"""Where in text[start:end] begins what belongs to a marker at `end`, or to one that may come there."""


class Markers:
    """Texts to look for, none of them part of another, so that the first to be complete is also the first to begin."""

    def __init__(self, *texts: str, padding: Padding = white_space) -> None:
        """`padding`: where in text[start:end] begins what belongs to a marker that follows it."""
        assert not any(a in b for a in texts for b in texts if a is not b), texts
        self.find = re.compile("|".join(map(re.escape, texts)))
        self.padding = padding
        begun = {text[:size] for text in texts for size in range(1, len(text))}
        self._begun = re.compile(f"(?:{'|'.join(map(re.escape, sorted(begun, key=len, reverse=True)))})\\Z")
        self._longest = max(map(len, texts))

    def undecided(self, text: str, start: int) -> int:
        """From where on text[start:], which holds no marker, may be the beginning of one, or its padding."""
        begun = self._begun.search(text, max(start, len(text) - self._longest + 1))
        return self.padding(text, start, begun.start() if begun else len(text))


class Scanner:
    """The text so far, from `committed` on. Positions count from the very beginning, so that they can be kept."""

    __slots__ = ("_dropped", "_ended", "_text", "at", "committed", "marker_at")

    def __init__(self) -> None:
        self._text = ""
        self._dropped = 0  # characters in front of _text
        self._ended = False
        self.at = 0
        self.committed = 0
        self.marker_at = 0  # where the marker that `until` found last begins, padding included

    def feed(self, text: str) -> None:
        self._text = self._text[self.committed - self._dropped :] + text
        self._dropped = self.committed

    def end(self) -> None:
        """No more comes."""
        self._ended = True

    @property
    def at_start(self) -> bool:
        """Whether nothing has been handed out or committed yet."""
        return not self.committed

    def commit(self) -> None:
        self.committed = self.at

    @property
    def uncommitted(self) -> str:
        return self._text[self.committed - self._dropped : self._here]

    @property
    def has_ended(self) -> bool:
        """Whether all of the text has come."""
        return self._ended

    @property
    def character(self) -> str:
        """The next one; empty if it has not come, or at the end."""
        here = self.at - self._dropped
        return self._text[here] if here < len(self._text) else ""

    @property
    def at_end(self) -> bool:
        """Whether all of the text has come and was read."""
        return self._ended and self._here == len(self._text)

    @property
    def marker(self) -> str:
        """What `until` read last: a marker, and the padding in front of it."""
        return self._text[self.marker_at - self._dropped : self._here]

    @property
    def _here(self) -> int:
        return self.at - self._dropped

    def peek(self) -> Steps[str]:
        """The next character; empty at the end."""
        while self._here == len(self._text):
            if self._ended:
                return ""
            yield
        return self._text[self._here]

    def next(self) -> Steps[str]:
        """The next character, read; Malformed at the end."""
        character = yield from self.peek()
        if not character:
            raise Malformed
        self.at += 1
        return character

    def take_run(self, run: re.Pattern[str]) -> str:
        """Of a run of characters of one class, what is there, read."""
        found = run.match(self._text, self._here)
        if found is None:
            return ""
        self.at += len(found[0])
        return found[0]

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """What is there of a pattern whose matches do not depend on what follows, read."""
        found = pattern.match(self._text, self._here)
        if found is not None:
            self.at += len(found[0])
        return found

    def matches(self, pattern: re.Pattern[str]) -> bool:
        """Whether what is there begins with it; reads nothing."""
        return pattern.match(self._text, self.at - self._dropped) is not None

    def read_run(self, run: re.Pattern[str], at_most: int) -> Steps[str]:
        """A run of characters of one class, read; Malformed if it is longer than `at_most`."""
        parts: list[str] = []
        keep = self.bounded_sink(parts, at_most)
        while (yield from self.peek()) and (part := self.take_run(run)):
            keep(part)
        return "".join(parts)

    def bounded_sink(self, parts: list[str], at_most: int) -> Sink:
        """For characters just read. Malformed if they are more than `at_most`; reading then goes on right behind the
        one too many, however many came at once."""

        def keep(part: str) -> None:
            parts.append(part)
            excess = sum(map(len, parts)) - at_most
            if excess > 0:
                self.at -= excess - 1
                raise Malformed

        return keep

    def take_rest(self) -> str:
        """All that is there, read."""
        text = self._text[self._here :]
        self.at += len(text)
        return text

    def skip_space(self) -> Steps[None]:
        while (yield from self.peek()) and self.take_run(SPACE):
            pass

    def try_text(self, *options: str) -> Steps[str]:
        """The one of `options` that comes next, read; empty, and nothing read, if none does. None begins another."""
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
        """The same; Malformed if none comes next. Where the text ends within one, that much is read."""
        found = yield from self.try_text(*options)
        if not found:
            rest = self._text[self._here :] if self._ended else ""
            if any(option.startswith(rest) for option in options):
                self.at += len(rest)
            raise Malformed
        return found

    def next_is(self, *options: str) -> Steps[bool]:
        """Whether one of `options` comes next; reads nothing."""
        found = yield from self.try_text(*options)
        self.at -= len(found)
        return bool(found)

    def ends_within(self, *options: str) -> Steps[bool]:
        """Whether the text ends here, or within one of `options`; then it is read."""
        comes = yield from self.next_is(*options)
        rest = self._text[self._here :]
        if comes or not self._ended or not any(option.startswith(rest) for option in options):
            return False
        self.at += len(rest)
        return True

    def read_until(self, markers: Markers, sink: Sink) -> Steps[str]:
        """Hands out text up to the padding of the first marker; returns the marker, read but not committed, or nothing
        at the end."""
        while True:
            found = markers.find.search(self._text, self._here)
            if found is not None:
                self._emit(markers.padding(self._text, self._here, found.start()), sink)
                self.marker_at = self.at
                self.at = self._dropped + found.end()
                return found[0]
            self._emit(len(self._text) if self._ended else markers.undecided(self._text, self._here), sink)
            if self._ended:
                return ""
            yield

    def _emit(self, end: int, sink: Sink) -> None:
        text = self._text[self._here : end]
        self.at = self._dropped + end
        if text:
            sink(text)
