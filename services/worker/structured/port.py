"""What the worker asks of a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2


class Matcher(Protocol):
    """Where one sequence is in its grammar."""

    library: str  # by name: whose it is

    def accept(self, token_ids: Sequence[int]) -> int:
        """Goes on by the first so many of these tokens that the grammar allows; none is an end of sequence."""

    def accept_sampled(self, token_id: int) -> bool:
        """Goes on by a token that was sampled, which is no end of sequence; False: the grammar does not allow it, or
        the library is at its limits, which `fault` then says, and the matcher is of no more use."""

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens."""

    def forced_tokens(self) -> list[int]:
        """Tokens that must come next, as far as there is no choice, in the tokenizer's own spelling."""

    @property
    def can_end(self) -> bool:
        """What has been accepted is whole."""

    @property
    def fault(self) -> str:
        """Why it cannot go on (its limits, mostly); empty if it can."""


class Grammar(Protocol):
    """Compiled once, for any number of sequences."""

    num_bytes: int  # of memory, about; 0 where that is not known

    def start(self) -> Matcher:
        """At its beginning."""


class MaskFiller(Protocol):
    """Makes masks, in threads of its own or in the caller's."""

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        """Each goes on by its token, which is no end of sequence; False: the grammar does not allow it, and the matcher
        is of no more use."""

    def fill(self, matchers: Sequence[Matcher], places: Sequence[int], masks: I32) -> None:
        """masks[places[i]] = the tokens that matchers[i] allows next, ends of sequence left out; a single one in the
        caller's thread. `masks` int32 [num_masks, ceil(vocab_size / 32)], a bit for each token, lowest bits first.
        Afterwards a matcher may have a fault."""


class GrammarBackend(Protocol):
    """A library, bound to a vocabulary. Any thread may call it; a matcher only has one caller at a time."""

    def compile(self, constraint: sampling_pb2.StructuredOutput) -> Grammar:
        """In bounded time and memory. Raises InvalidArgument for a constraint that is wrong, that nothing fulfils, or
        that is too large."""

    def filler(self) -> MaskFiller:
        """A new one."""
