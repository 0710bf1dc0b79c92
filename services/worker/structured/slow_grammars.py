"""Remembers grammars whose sequences were ended as too slow, and refuses further sequences under them."""

from __future__ import annotations

from collections import Counter, OrderedDict

from quire.shared.errors import InvalidArgument
from quire.shared.structured_output.checks import FIELD

MAX_ENDED = 3  # sequences per grammar: a single one may have been slow because of its length
MAX_REFUSED = 64  # sequences per grammar, after which one more is tried
REMEMBERED = 1024  # grammars, the most recently ended ones


class SlowGrammars:
    """Counts by grammar the sequences that were ended as too slow, the most recently ended grammar last, and refuses
    new sequences under grammars with MAX_ENDED of them."""

    def __init__(self, remembered: int = REMEMBERED) -> None:
        """`remembered`: maximum number of grammars whose counts are kept."""
        self._remembered = remembered
        self._num_ended: OrderedDict[bytes, int] = OrderedDict()
        self._num_refused: Counter[bytes] = Counter()

    def record_ended(self, grammar_id: bytes) -> None:
        """Counts a sequence of this grammar that was ended as too slow; forgets the least recently ended grammar if
        there are too many."""
        self._num_ended[grammar_id] = self._num_ended.pop(grammar_id, 0) + 1
        if len(self._num_ended) > self._remembered:
            oldest, _ = self._num_ended.popitem(last=False)
            self._num_refused.pop(oldest, None)

    def check(self, grammar_id: bytes) -> None:
        """Raises InvalidArgument for a grammar under which MAX_ENDED sequences were too slow; lets one sequence pass
        after MAX_REFUSED refused ones, since a grammar may be fast again under less load."""
        num_ended = self._num_ended.get(grammar_id, 0)
        if num_ended < MAX_ENDED:
            return
        self._num_refused[grammar_id] += 1
        if self._num_refused[grammar_id] > MAX_REFUSED:
            del self._num_refused[grammar_id]
            return
        text = f"{FIELD}: the grammar is too slow: {num_ended} sequences under it were ended; make it unambiguous"
        raise InvalidArgument(text, field=FIELD)
