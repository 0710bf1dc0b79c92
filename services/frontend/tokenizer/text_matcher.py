"""Search for a set of texts in one pass, in steps between which other threads can run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

STEP_CHARACTERS = 64 * 1024  # searched at once: a search holds the GIL


class TextMatcher:
    """Matcher for a set of texts, which also finds partial occurrences at the ends of a text."""

    def __init__(
        self,
        texts: Iterable[str],
        alone: Iterable[str] = (),
        others: str = "",
        step_characters: int = STEP_CHARACTERS,
    ) -> None:
        """Compiles the expressions for the texts.

        `alone`: the texts that match only as whole words. `others`: an additional class of non-ASCII characters.
        `step_characters`: searched at once.
        """
        self._step_characters = step_characters
        sorted_texts = sorted(set(texts))
        alone = set(alone)
        self._others = bool(others)
        self._longest = max(map(len, sorted_texts), default=0)
        self._firsts = {text[0] for text in sorted_texts}
        parts = [_trie(text for text in sorted_texts if text not in alone)]
        parts += [rf"(?<!\w)(?:{_trie([text])})(?!\w)" for text in sorted_texts if text in alone]
        self._whole = re.compile("|".join(filter(None, [*parts, others])) or r"(?!)")
        self._ends = re.compile(_trie(text[i:] for text in sorted_texts for i in range(1, len(text))) or r"(?!)")
        starts = _trie(text[:i] for text in sorted_texts for i in range(1, len(text)))
        self._starts = re.compile(rf"(?:{starts})\Z" if starts else r"(?!)")

    def spans(self, text: str) -> Iterator[tuple[int, int]]:
        """Yields the spans of all occurrences from left to right, the longest at each position."""
        if not any(first in text for first in self._firsts) and (text.isascii() or not self._others):
            return
        position = 0
        while position < len(text):
            end = position + self._step_characters
            match = self._whole.search(text, position, end + self._longest)
            if match is not None and match.start() < end:
                yield match.span()
                position = match.end()
            else:
                position = end

    def suffix_end(self, text: str, start: int) -> int:
        """Returns the end of a partial occurrence that `text` begins with at `start`; `start` if there is none."""
        match = self._ends.match(text, start)
        return start if match is None else match.end()

    def prefix_start(self, text: str, end: int) -> int:
        """Returns the start of a partial occurrence that `text` ends with at `end`; `end` if there is none."""
        match = self._starts.search(text, max(0, end - self._longest), end)
        return end if match is None else match.start()


def _trie(texts: Iterable[str]) -> str:
    """Returns an expression for any of the texts, the longest first, that reads each character once."""
    root: dict[str, dict[str, object]] = {}
    for text in texts:
        node = root
        for character in text:
            node = node.setdefault(character, {})  # type: ignore[assignment]
        node[""] = {}
    return _branches(root) if root else ""


def _branches(node: dict[str, dict[str, object]]) -> str:
    """Returns the regular expression for a trie node's texts; the empty key marks the end of a text, longer texts
    match first."""
    written = [re.escape(first) + _branches(rest) for first, rest in sorted(node.items()) if first]  # type: ignore[arg-type]
    if not written:
        return ""
    joined = written[0] if len(written) == 1 and "" not in node else f"(?:{'|'.join(written)})"
    return joined + "?" if "" in node else joined
