"""Grammars that the worker prepares once, whoever needs them: sequences wait, blocked, until theirs is ready.

The worker keeps what it was told to prepare until it is told to release it. Grammars that nobody needs at present stay
for a while, so that the next request of the same form need not wait.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from quire.services.scheduler.core.sequences.sequence import Sequence

# Prepared grammars that no sequence needs: a compiled one takes up to a thousand times its text.
MOST_IDLE = 128
MOST_IDLE_BYTES = 1 << 20  # of text


@dataclass(frozen=True, slots=True)
class GrammarOrder:
    """What the worker is to do: prepare the grammar of `sequence`, or release it, if there is none."""

    grammar_id: bytes
    sequence: Sequence | None


@dataclass(slots=True)
class _Grammar:
    num_bytes: int  # of its text
    ready: bool = False
    users: set[int] = field(default_factory=set)  # keys
    blocked: dict[int, Sequence] = field(default_factory=dict)  # by key


class Grammars:
    """Which grammars the worker has, and who needs or awaits them."""

    def __init__(self) -> None:
        self._grammars: dict[bytes, _Grammar] = {}
        self._idle: OrderedDict[bytes, int] = OrderedDict()  # bytes of those without users; longest idle first
        self._orders: list[GrammarOrder] = []

    @property
    def num_blocked(self) -> int:
        return sum(len(grammar.blocked) for grammar in self._grammars.values())

    def blocked(self) -> list[Sequence]:
        return [sequence for grammar in self._grammars.values() for sequence in grammar.blocked.values()]

    def join(self, sequence: Sequence) -> bool:
        """Whether `sequence` can run; else it is blocked until prepared() or failed() names it."""
        grammar_id = sequence.grammar_id
        grammar = self._grammars.get(grammar_id)
        if grammar is None:
            grammar = self._grammars[grammar_id] = _Grammar(sequence.grammar_bytes)
            self._orders.append(GrammarOrder(grammar_id, sequence))
        self._idle.pop(grammar_id, None)
        grammar.users.add(sequence.key)
        if not grammar.ready:
            grammar.blocked[sequence.key] = sequence
        return grammar.ready

    def leave(self, sequence: Sequence) -> None:
        """`sequence` will not run here (any more)."""
        grammar = self._grammars.get(sequence.grammar_id)
        if grammar is None:
            return  # it failed, and took its users along
        grammar.users.discard(sequence.key)
        grammar.blocked.pop(sequence.key, None)
        if grammar.ready and not grammar.users:
            self._keep_idle(sequence.grammar_id)

    def prepared(self, grammar_id: bytes) -> list[Sequence]:
        """The grammar is ready: those who waited for it."""
        grammar = self._grammars[grammar_id]
        grammar.ready = True
        freed = list(grammar.blocked.values())
        grammar.blocked.clear()
        if not grammar.users:
            self._keep_idle(grammar_id)
        return freed

    def failed(self, grammar_id: bytes) -> list[Sequence]:
        """It cannot be had: those who waited for it. The next one to ask makes the worker try again."""
        return list(self._grammars.pop(grammar_id).blocked.values())

    def take_orders(self) -> list[GrammarOrder]:
        """In the order in which the worker must get them."""
        orders, self._orders = self._orders, []
        return orders

    def awaits(self, grammar_id: bytes) -> bool:
        """Whether the worker owes word of this grammar."""
        grammar = self._grammars.get(grammar_id)
        return grammar is not None and not grammar.ready

    def _keep_idle(self, grammar_id: bytes) -> None:
        self._idle[grammar_id] = self._grammars[grammar_id].num_bytes
        while len(self._idle) > MOST_IDLE or sum(self._idle.values()) > MOST_IDLE_BYTES:
            oldest, _ = self._idle.popitem(last=False)
            del self._grammars[oldest]
            self._orders.append(GrammarOrder(oldest, None))
