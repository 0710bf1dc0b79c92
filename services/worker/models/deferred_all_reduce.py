"""All-reduces that layers defer to the norms after them, where one kernel adds up and normalises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Protocol, runtime_checkable

if TYPE_CHECKING:
    from quire.services.worker.layers.sharding import Collectives


@runtime_checkable
class DefersAllReduce(Protocol):
    """Layer whose output may stay a rank's partial sum."""

    def defer_all_reduce(self, *, deferred: bool) -> bool:
        """Sets whether the output is a rank's partial sum; returns whether it is one, which not every layer can do."""


@runtime_checkable
class CompletesAllReduce(Protocol):
    """Layer that begins with a norm, which may add up the ranks' partial sums of its input."""

    def complete_all_reduce(self, collectives: Collectives | None) -> None:
        """Sets what adds up the ranks' partial sums that come beside a residual; None: the input is whole."""


def defer_all_reduces(parts: Sequence[object], kept: Collection[int], collectives: Collectives) -> None:
    """Defers the all-reduce of each part to the next one where both can. `parts` are called in this order, each with
    the output of the one before; the inputs of those at the places `kept` stay whole, because others read them too."""
    if not collectives.norms_sums:
        return
    for place, (layer, following) in enumerate(pairwise(parts), 1):
        if isinstance(layer, DefersAllReduce) and isinstance(following, CompletesAllReduce):
            deferred = layer.defer_all_reduce(deferred=place not in kept)
            following.complete_all_reduce(collectives if deferred else None)
