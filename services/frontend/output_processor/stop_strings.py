"""Stop strings, which end a text where they occur, however tokens split it.

An automaton follows each string (Knuth, Morris, Pratt 1977), one character at a time, so that the outcome depends on
the text alone and the cost does not grow with the strings' length. Text is held back only while it may still begin a
match.
"""

from __future__ import annotations

from collections.abc import Sequence


class _Pattern:
    """Matching state of one string at the end of the text so far."""

    __slots__ = ("_borders", "depth", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.depth = 0
        self._borders = _borders(text)

    def advance(self, character: str) -> bool:
        """Returns whether this character completes the string; the automaton continues from the longest overlap."""
        text, depth = self.text, self.depth
        while depth and text[depth] != character:
            depth = self._borders[depth - 1]
        if text[depth] == character:
            depth += 1
        complete = depth == len(text)
        self.depth = self._borders[-1] if complete else depth
        return complete


def _borders(text: str) -> list[int]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    length = 0
    for i in range(1, len(text)):
        while length and text[i] != text[length]:
            length = borders[length - 1]
        if text[i] == text[length]:
            length += 1
        borders[i] = length
    return borders


class StopStrings:
    """Set of stop strings. The string that completes first wins; of two that complete together, the longer one."""

    __slots__ = ("_firsts", "_held", "_include", "_patterns")

    def __init__(self, stops: Sequence[str], *, include: bool) -> None:
        """Builds an automaton for each string.

        `include`: keep the matched string in the text; then nothing needs to be held back.
        """
        self._patterns = [_Pattern(stop) for stop in stops]
        self._firsts = frozenset(stop[0] for stop in stops)
        self._include = include
        self._held = ""

    def push(self, text: str, *, may_stop: bool = True) -> tuple[str, str | None]:
        """Returns text that can be emitted, and the stop string if one has matched; nothing may follow a match.

        `may_stop`: False below min_tokens, where completed matches do not count.
        """
        window = self._held + text
        if not self._active and self._firsts.isdisjoint(text):
            return window, None
        for position, character in enumerate(text, start=len(self._held) + 1):
            complete = [p.text for p in self._patterns if p.advance(character)]
            if complete and may_stop:
                return self._cut(window[:position], max(complete, key=len))
        return self._hold(window), None

    @property
    def _active(self) -> bool:
        return any(pattern.depth for pattern in self._patterns)

    def _cut(self, text: str, stop: str) -> tuple[str, str]:
        self._held = ""
        return (text if self._include else text[: len(text) - len(stop)]), stop

    def _hold(self, window: str) -> str:
        """Returns the part of the text that no stop string can still contain, and holds the rest. Nothing is held if
        stop strings are included in the output."""
        keep = 0 if self._include else max(pattern.depth for pattern in self._patterns)
        out = window[: len(window) - keep]
        self._held = window[len(out) :]
        return out

    def flush(self) -> str:
        """Returns the text held back at the end; a new text may begin afterwards."""
        for pattern in self._patterns:
            pattern.depth = 0
        held, self._held = self._held, ""
        return held
