"""Attention with an elementwise gate on its result (arXiv 2505.06708)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.services.worker.layers.attention.attention import Attention
from quire.services.worker.layers.linear import Projection

if TYPE_CHECKING:
    from torch import Tensor

    from quire.services.worker.attention.port import AttentionMetadata
    from quire.services.worker.kv.kv_cache import LayerCache
    from quire.services.worker.layers.forward_batch import ForwardBatch
    from quire.services.worker.models.config.decoder_config import DecoderConfig


class GatedAttention(Attention):
    """Attention whose `q_proj` contains, for each head, the query and a gate of the same size."""

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        return Attention.inputs(name, 2 * q_size, kv_size, config)

    def _reorder(self) -> None:
        """Moves all queries before all gates; both stay in one projection, because adapters add to it."""
        import torch

        num_rows = 2 * self._heads.num_q * self._config.head_dim
        rows = torch.arange(self.qkv.out_features, device=self._place.device)
        both = rows[:num_rows].view(self._heads.num_q, 2, self._config.head_dim)
        self.qkv.reorder(torch.cat((both.transpose(0, 1).flatten(), rows[num_rows:])))
        super()._reorder()

    @property
    def _reordered_heads(self) -> list[int]:
        num_q = self._heads.num_q
        return [*range(num_q), *range(2 * num_q, 2 * num_q + self._heads.num_kv)]

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Stores keys and values; returns queries followed by gates, [num_tokens, 2 * num_q_heads, head_dim], for
        attend()."""
        import torch

        num_q, size = self._heads.num_q, self._config.head_dim
        projected = self.qkv(x)
        queries, gates, rest = projected.split(
            (num_q * size, num_q * size, projected.size(1) - 2 * num_q * size), dim=1
        )
        q = self._store(torch.cat((queries, rest), dim=1), batch, cache, cos_sin)
        return torch.cat((q, gates.unflatten(1, (num_q, size))), dim=1)

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        """Attends with the queries, multiplies the result by the sigmoid of the gates and projects it.

        `q`: as store() returned it; returns [num_tokens, hidden_size].
        """
        queries, gates = q.chunk(2, dim=1)
        attended = self._attended(queries.contiguous(), cache, metadata)
        return self.output((attended * gates.sigmoid()).flatten(1))
