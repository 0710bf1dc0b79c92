"""All-reduces that layers defer to the norms after them, where one kernel adds up and normalises."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from quire.services.worker.layers.norm.rms_norm import RMSNorm

if TYPE_CHECKING:
    from quire.services.worker.layers.sharding import Collectives


class DeferringFeedForward(Protocol):
    """Feed-forward layer whose output may stay a rank's partial sum."""

    @property
    def dispatches(self) -> bool:
        """Whether ranks exchange rows, so that each has whole sums of its own."""

    def defer_all_reduce(self, *, deferred: bool) -> None: ...


class CompletingNorm(Protocol):
    """Norm that may add up the ranks' partial sums of its input."""

    def complete_all_reduce(self, collectives: Collectives | None) -> None:
        """Sets what adds up the ranks' partial sums that come beside a residual; None: the input is whole."""


@runtime_checkable
class DeferringLayer(Protocol):
    """Layer that begins with such a norm and ends with such a feed-forward layer, as LlamaLayer."""

    input_norm: CompletingNorm
    mlp: DeferringFeedForward


def defer_all_reduces(
    layers: Sequence[object], last_norm: object, kept: Collection[int], collectives: Collectives
) -> None:
    """Defers the all-reduce at the end of each layer to the norm at the start of the next, and that of the last layer
    to `last_norm` (None: a stage without one), where both can. Inputs of the layers at the places `kept` stay whole,
    because drafters read them, too."""
    if not collectives.fuses_rms_norm:
        return
    norms = [layer.input_norm if isinstance(layer, DeferringLayer) else None for layer in layers[1:]]
    for place, (layer, norm) in enumerate(zip(layers, [*norms, _completing(last_norm)], strict=True), 1):
        if isinstance(layer, DeferringLayer) and norm is not None:
            deferred = place not in kept and not layer.mlp.dispatches
            layer.mlp.defer_all_reduce(deferred=deferred)
            norm.complete_all_reduce(collectives if deferred else None)


def _completing(norm: object) -> CompletingNorm | None:
    return norm if isinstance(norm, RMSNorm) else None
