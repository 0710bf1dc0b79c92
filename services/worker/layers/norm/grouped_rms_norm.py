"""RMS norm of groups of heads that are distributed over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from quire.services.worker.layers.sharding import HeadShare, head_features, portion

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.layers.placement import Destination, LayerPlacement
    from quire.services.worker.layers.sharding import Collectives


class GroupedRMSNorm:
    """RMS norm per group of heads that share a key; squares are all-reduced if ranks share a group."""

    def __init__(
        self, name: str, heads: HeadShare, num_groups: int, size: int, place: LayerPlacement, *, eps: float
    ) -> None:
        """Builds this rank's part.

        `heads`: of this rank; `num_groups`, `size`: groups and total elements of the whole model.
        """
        import torch

        shard = place.shard
        self._name, self._total, self._eps, self._ops = name, size, eps, place.ops
        share = shard.part(size, "the heads' elements")
        (self._taken,) = head_features(heads.queries, len(share) // heads.num_q)
        self._weight: Tensor = place.empty(len(share))
        self._group_size = size // num_groups
        self._num_parts = heads.num_kv  # (parts of) groups on this rank
        self._ones: Tensor = place.empty(self._group_size).fill_(1.0)
        self._collectives = shard.collectives if num_groups % shard.size else None
        # Shared groups: the group of each part, and a matrix with 1 at each group's parts.
        self._groups: Tensor = torch.tensor(heads.keys, device=place.device)
        self._parts_of = (self._groups[:, None] == torch.arange(num_groups, device=place.device)).float()

    def destinations(self) -> Iterator[tuple[str, Destination]]:
        yield f"{self._name}.weight", portion(self._weight, 0, (self._taken,), self._total)

    def finish(self) -> None:
        """Does nothing: the weight is used as loaded, without packing."""

    def __call__(self, x: Tensor) -> Tensor:
        """Normalizes [num_tokens, elements of this rank] -> the same shape."""
        if self._collectives is None:
            normed: Tensor = self._ops.rms_norm(x.view(-1, self._group_size), self._ones, self._eps)
        else:
            normed = self._normalize_across_ranks(x, self._collectives)
        return normed.view(x.shape) * self._weight

    def _normalize_across_ranks(self, x: Tensor, collectives: Collectives) -> Tensor:
        """Normalizes x with the squares of all ranks; returns [num_tokens, parts of groups, elements of a part], not
        yet weighted."""
        import torch

        wide = x.float().unflatten(1, (self._num_parts, -1))
        squares = (wide.square().sum(2, keepdim=True) * self._parts_of).sum(1)  # [num_tokens, num_groups]
        squares = collectives.all_reduce(squares).index_select(1, self._groups)
        scale = torch.rsqrt(squares / self._group_size + self._eps)
        normed: Tensor = (wide * scale.unsqueeze(2)).to(x.dtype)
        return normed
