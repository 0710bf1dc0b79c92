"""Deferred all-reduces: a layer leaves its all-reduce to the next norm, where one kernel reduces and normalizes."""

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
        """Whether rows are dispatched between ranks, so that the results are complete sums."""

    def defer_all_reduce(self, *, deferred: bool) -> None: ...


class CompletingNorm(Protocol):
    """Norm that can reduce the ranks' partial sums of its input."""

    def complete_all_reduce(self, collectives: Collectives | None) -> None:
        """Sets the collectives that reduce the norm's input; None: the input is complete."""


@runtime_checkable
class DeferringLayer(Protocol):
    """Layer whose first norm can complete an all-reduce and whose feed-forward can defer one, such as LlamaLayer."""

    input_norm: CompletingNorm
    mlp: DeferringFeedForward


def defer_all_reduces(
    layers: Sequence[object], last_norm: object, kept: Collection[int], collectives: Collectives
) -> None:
    """Defers the all-reduce at the end of each layer to the next layer's norm, and that of the last layer to
    `last_norm`.

    `last_norm` is None on a stage without one. The inputs of the layers at the indices `kept` stay complete, because
    drafters read them, too.
    """
    if not collectives.fuses_rms_norm:
        return
    norms = [layer.input_norm if isinstance(layer, DeferringLayer) else None for layer in layers[1:]]
    for place, (layer, norm) in enumerate(zip(layers, [*norms, _completing(last_norm)], strict=True), 1):
        if isinstance(layer, DeferringLayer) and norm is not None:
            deferred = place not in kept and not layer.mlp.dispatches
            layer.mlp.defer_all_reduce(deferred=deferred)
            norm.complete_all_reduce(collectives if deferred else None)


def _completing(norm: object) -> CompletingNorm | None:
    """Returns `norm` if it can complete an all-reduce, else None."""
    return norm if isinstance(norm, RMSNorm) else None
