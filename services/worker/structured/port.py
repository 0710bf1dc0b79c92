"""Interface of a grammar library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from quire.shared.columns import I32
from quire.shared.pb.common.v1 import sampling_pb2


class Matcher(Protocol):
    """Position of one sequence in its grammar; one caller at a time."""

    library: str  # name of its library

    def accept(self, token_ids: Sequence[int]) -> int:
        """Consumes the longest prefix of these tokens that the grammar allows and returns its length; none is an end
        token."""

    def accept_sampled(self, token_id: int) -> bool:
        """Consumes a sampled token, which is not an end token.

        Returns False if the grammar does not allow it or the library is at its limits, which `fault` reports; the
        matcher must not be used any further then.
        """

    def rollback(self, count: int) -> None:
        """Takes back the last `count` tokens that accept() or accept_sampled() consumed; 0 does nothing."""

    def forced_tokens(self) -> list[int]:
        """Returns the tokens that must come next, up to the first choice, as the tokenizer would spell them."""

    @property
    def can_end(self) -> bool:
        """Whether the accepted text is complete."""

    @property
    def fault(self) -> str:
        """Reason why the matcher cannot continue, mostly its limits; empty if it can."""


class Grammar(Protocol):
    """Compiled grammar, shared by any number of sequences."""

    num_bytes: int  # approximate memory; 0 if unknown

    def new_matcher(self) -> Matcher:
        """Returns a matcher at the grammar's start."""


class MaskFiller(Protocol):
    """Fills masks, in threads of its own or in the caller's."""

    def accept(self, matchers: Sequence[Matcher], token_ids: Sequence[int]) -> list[bool]:
        """Advances each matcher by its token, which is not an end token; False where the grammar does not allow it, and
        the matcher must not be used any further."""

    def fill(self, matchers: Sequence[Matcher], places: Sequence[int], masks: I32) -> None:
        """Fills masks[places[i]] with the tokens that matchers[i] allows next, without end tokens; a single mask in the
        caller's thread.

        `masks`: int32 [num_masks, ceil(vocab_size / 32)], a bit per token, lowest bits first. A matcher may have a
        fault afterwards.
        """


class GrammarBackend(Protocol):
    """A library bound to a vocabulary. Thread-safe, except that a matcher has one caller at a time."""

    def compile(self, constraint: sampling_pb2.StructuredOutput) -> Grammar:
        """Compiles a constraint in bounded time and memory. Raises InvalidArgument for one that is invalid,
        unsatisfiable or too large."""

    def filler(self) -> MaskFiller:
        """Returns a new mask filler."""
