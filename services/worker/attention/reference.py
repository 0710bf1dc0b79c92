"""Attention in plain torch: runs anywhere."""

from __future__ import annotations

from torch import Tensor

from kernels import reference
from services.worker.attention.port import AttentionMetadata, AttentionSpec


class ReferenceAttention:
    """kernels.reference.attention.paged_attention."""

    masks_trees = True
    records_decodes = records_chunks = False

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 0

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return None

    def attend(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        *,
        scale: float,
        window: int,
        sinks: Tensor | None = None,
        softcap: float = 0.0,
        chunked: bool = False,
    ) -> Tensor:
        return reference.paged_attention(
            q,
            k_cache,
            v_cache,
            metadata.block_tables,
            metadata.query_start,
            metadata.seq_lens,
            scale,
            window,
            sinks,
            softcap,
            chunked,
            metadata.tree_mask,
        )

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        tables, starts, lens = metadata.block_tables, metadata.query_start, metadata.seq_lens
        return reference.latent_attention(q, q_rotated, cache, tables, starts, lens, scale)
