"""Attention whose results are gated, element by element (arXiv 2505.06708)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from services.worker.layers.attention.attention import Attention
from services.worker.layers.linear import Projection

if TYPE_CHECKING:
    from torch import Tensor

    from services.worker.attention.port import AttentionMetadata
    from services.worker.kv.kv_cache import LayerCache
    from services.worker.models.config.decoder_config import DecoderConfig
    from services.worker.step.forward_batch import ForwardBatch


class GatedAttention(Attention):
    """Each query head has a gate beside it in the checkpoint's `q_proj`, as long as the query."""

    @staticmethod
    def inputs(name: str, q_size: int, kv_size: int, config: DecoderConfig) -> list[Projection]:
        return Attention.inputs(name, 2 * q_size, kv_size, config)

    def _arrange(self) -> None:
        """Queries, keys and values, then the gates."""
        import torch

        size, heads = self._config.head_dim, self._heads
        both = torch.arange(2 * heads.num_q * size, device=self._place.device).view(heads.num_q, 2, size)
        others = torch.arange(2 * heads.num_kv * size, device=self._place.device) + both.numel()
        self.qkv.reorder(torch.cat((both[:, 0].flatten(), others, both[:, 1].flatten())))
        super()._arrange()

    def store(self, x: Tensor, batch: ForwardBatch, cache: LayerCache, cos_sin: Tensor) -> Tensor:
        """Returns the queries and behind them their gates, [num_tokens, 2 * num_q_heads, head_dim]."""
        import torch

        heads, size = self._heads, self._config.head_dim
        qkv, gates = self.qkv(x).split(((heads.num_q + 2 * heads.num_kv) * size, heads.num_q * size), dim=1)
        q = self._store(qkv.contiguous(), batch, cache, cos_sin)
        return torch.cat((q, gates.unflatten(1, (heads.num_q, size))), dim=1)

    def attend(self, q: Tensor, cache: LayerCache, metadata: AttentionMetadata) -> Tensor:
        queries, gates = q.chunk(2, dim=1)
        attended = self._attended(queries.contiguous(), cache, metadata)
        return self.output((attended * gates.sigmoid()).flatten(1))
