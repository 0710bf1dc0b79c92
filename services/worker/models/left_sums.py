"""Sums over ranks that layers leave to the norms behind them, where one kernel adds up and normalises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from quire.services.worker.layers.sharding import Collectives


@runtime_checkable
class LeavesParts(Protocol):
    def leave_parts(self, *, left: bool) -> bool:
        """From now on what it gives is a rank's part of a sum, if such are `left`; whether it can, and they are."""


@runtime_checkable
class TakesParts(Protocol):
    def take_parts(self, collectives: Collectives | None) -> None:
        """From now on what comes beside a residual is a rank's part of a sum; None: all of it."""


def leave_sums(parts: Sequence[object], kept: Collection[int], collectives: Collectives) -> None:
    """`parts`: what is called one behind the other, each with what the one before gives; `kept`: places of those that
    are to get whole sums, because others read them, too."""
    if not collectives.norms_sums:
        return
    for place, (layer, behind) in enumerate(pairwise(parts), 1):
        if isinstance(layer, LeavesParts) and isinstance(behind, TakesParts):
            left = layer.leave_parts(left=place not in kept)
            behind.take_parts(collectives if left else None)
