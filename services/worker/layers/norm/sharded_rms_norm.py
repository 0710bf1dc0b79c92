"""RMS norm over all heads at once, distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.services.worker.layers.norm.rms_norm import RMSNorm
from quire.services.worker.layers.sharding import head_features, portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.models.config.decoder_config import DecoderConfig


def sharded_rms_norms(name: str, config: DecoderConfig, place: LayerPlacement) -> list[RMSNorm | ShardedRMSNorm]:
    """Returns the norms over all heads of queries and of keys, in this order: plain ones on a single rank."""
    names, totals = (f"{name}.q_norm", f"{name}.k_norm"), (config.num_q_heads, config.num_kv_heads)
    if place.shard.is_whole:
        return [
            RMSNorm(norm, total * config.head_dim, config.rms_norm_eps, place)
            for norm, total in zip(names, totals, strict=True)
        ]
    own = place.shard.heads(*totals)
    queries = [(head, True) for head in own.queries]
    keys = list(zip(own.keys, own.owned, strict=True))
    return [
        ShardedRMSNorm(norm, heads, total, place, head_dim=config.head_dim, eps=config.rms_norm_eps)
        for norm, heads, total in zip(names, (queries, keys), totals, strict=True)
    ]


class ShardedRMSNorm:
    """RMS norm over all heads of the model, of which a rank has some; squares are all-reduced."""

    def __init__(
        self, name: str, heads: list[tuple[int, bool]], total: int, place: LayerPlacement, *, head_dim: int, eps: float
    ) -> None:
        """Builds this rank's part.

        `heads`: of this rank, and whether each counts here, because ranks may hold copies of a head; `total`: heads of
        the model.
        """
        import torch

        self._name, self._shard, self._eps, dim = name, place.shard, eps, head_dim
        self.size = len(heads) * dim
        self._taken = head_features(tuple(head for head, _ in heads), dim)
        self._weight: Tensor = place.empty(self.size)
        counts = torch.tensor([counts for _, counts in heads], device=place.device)
        self._counts: Tensor = counts.repeat_interleave(dim)
        self._total = total * dim

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self._weight, 0, self._taken, self._total)

    def finish(self) -> None:
        """Does nothing: the weight is used as loaded, without packing."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes [num_tokens, size of this rank] -> the same shape."""
        import torch

        wide = x.float()
        squares = self._shard.collectives.all_reduce((wide.square() * self._counts).sum(1, keepdim=True))
        normed = wide * torch.rsqrt(squares / self._total + self._eps)
        return normed.to(x.dtype) * self._weight
