"""Ranks that have the same of a model and share out the tokens of long steps: context parallel.

As in the training of Llama 3 (arXiv 2407.21783, 3.3.2): each rank computes its own tokens, and before they attend,
the keys and values of all of a step's tokens are gathered, so that every rank's cache has everything. (How tokens are
shared out: step/token_shares.py.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor

FIELD = "context_parallel_size"


class Peers(Protocol):
    """What such ranks do together: all of them, in the same order, with tensors of the same shape."""

    def all_gather(self, x: Tensor) -> Tensor:
        """[size, *x.shape], in the order of ranks."""

    def broadcast(self, x: Tensor) -> None:
        """`x` becomes what it is on the first one."""

    def min_over_ranks(self, value: int) -> int:
        """Of all ranks' values."""


class _SinglePeer:
    """Of a rank that computes all tokens."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.unsqueeze(0)

    def broadcast(self, x: Tensor) -> None:
        """It is the first one's."""

    def min_over_ranks(self, value: int) -> int:
        return value


@dataclass(frozen=True, slots=True)
class Context:
    """A rank's place among those that share out the tokens."""

    rank: int = 0
    size: int = 1
    peers: Peers = field(default_factory=_SinglePeer)

    @property
    def is_whole(self) -> bool:
        return self.size == 1


ALL_TOKENS = Context()
