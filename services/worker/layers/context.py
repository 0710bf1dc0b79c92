"""Context parallelism: ranks with the same weights partition the tokens of long steps.

As in the training of Llama 3 (arXiv 2407.21783, 3.3.2): each rank computes its tokens, and before attention the keys
and values of all tokens of the step are gathered, so every rank's cache is complete. (Partition of tokens:
step/token_shares.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "context_parallel_size"


class Peers(Protocol):
    """Collectives of context-parallel ranks, called by all of them in the same order with tensors of equal shapes."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Gathers x of all ranks: [size, *x.shape], in rank order."""

    def broadcast(self, x: Tensor) -> None:
        """Overwrites `x` with its value on the first rank."""

    def min_over_ranks(self, value: int) -> int:
        """Returns the minimum of all ranks' values."""


class _SinglePeer:
    """Collectives of a rank that computes all tokens: each returns its own value."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor) -> None:
        """Does nothing: `x` is the first rank's."""

    def min_over_ranks(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class Context:
    """Rank and size of the context-parallel group that partitions the tokens, with its collectives."""

    rank: int = 0
    size: int = 1
    peers: Peers = field(default_factory=_SinglePeer)

    @property
    def is_whole(self) -> bool:
        return self.size == 1


ALL_TOKENS = Context()
