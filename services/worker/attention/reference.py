"""Attention backend in plain torch, for any device."""

from __future__ import annotations

from collections.abc import Hashable

from torch import Tensor

from quire.kernels import reference
from quire.kernels.reference.attention.decode_parts import DecodeParts, decode_parts
from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec


class ReferenceAttention:
    """Calls quire.kernels.reference.attention.paged_attention; accepts every model and device and is never recorded."""

    masks_trees = sees_ahead = True
    records_decodes = records_chunks = False

    def __init__(self) -> None:
        self._parts: tuple[AttentionMetadata | None, dict[Hashable, DecodeParts]] = None, {}  # of the current step

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
        """Computes attention in plain torch; decodes of several rows gather their key positions once a step for all
        layers."""
        is_decode = metadata.is_decode and q.size(0) > 1
        parts = self._decode_parts(q, k_cache, metadata, window, chunked) if is_decode else None
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
            parts,
            metadata.seen_ends,
        )

    def _decode_parts(
        self, q: Tensor, k_cache: Tensor, metadata: AttentionMetadata, window: int, chunked: bool
    ) -> DecodeParts:
        """Returns the gathered key positions of a decode step, shared by layers with the same window and shapes.

        Computed at the step's first such layer; those of the previous step are discarded.
        """
        step, parts = self._parts
        if step is not metadata:
            self._parts = _, parts = metadata, {}
        kind = (k_cache.shape[1:], q.dtype, window, chunked)
        if kind not in parts:
            tables, lens = metadata.block_tables, metadata.seq_lens
            parts[kind] = decode_parts(tables, lens, k_cache, q.dtype, window, chunked, metadata.tree_mask)
        return parts[kind]

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Computes latent attention in plain torch, without tree masks."""
        tables, starts, lens = metadata.block_tables, metadata.query_start, metadata.seq_lens
        return reference.latent_attention(q, q_rotated, cache, tables, starts, lens, scale)
