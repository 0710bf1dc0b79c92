"""Remembers grammars whose sequences were ended as too slow, and refuses the next sequences under them."""

from __future__ import annotations

from collections import Counter, OrderedDict

from quire.shared.errors import InvalidArgument
from quire.shared.structured_output.checks import FIELD

MAX_ENDED = 3  # sequences of a grammar: one may have been slow for its length
MAX_REFUSED = 64  # sequences of a grammar; then one more is tried
REMEMBERED = 1024  # grammars


class SlowGrammars:
    """Counts ended sequences by grammar, least recently ended first."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """`remembered`: grammars."""
        self._remembered = remembered
        self._num_ended: OrderedDict[bytes, int] = OrderedDict()
        self._num_refused: Counter[bytes] = Counter()

    def record_ended(self, grammar_id: bytes) -> None:
        """A sequence of this grammar was ended."""
        self._num_ended[grammar_id] = self._num_ended.pop(grammar_id, 0) + 1
        if len(self._num_ended) > self._remembered:
            oldest, _ = self._num_ended.popitem(last=False)
            self._num_refused.pop(oldest, None)

    def check(self, grammar_id: bytes) -> None:
        """Raises InvalidArgument for one that has been too slow too often. One of many is tried again: what was slow
        beside others may be fast without them."""
        num_ended = self._num_ended.get(grammar_id, 0)
        if num_ended < MAX_ENDED:
            return
        self._num_refused[grammar_id] += 1
        if self._num_refused[grammar_id] > MAX_REFUSED:
            del self._num_refused[grammar_id]
            return
        text = f"{FIELD}: the grammar is too slow: {num_ended} sequences under it were ended; make it unambiguous"
        raise InvalidArgument(text, field=FIELD)
