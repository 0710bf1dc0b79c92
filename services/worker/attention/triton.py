"""Attention backend over this project's Triton kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from quire import kernels
from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec

PACKAGE = "quire.kernels.triton"


class TritonAttention:
    """Calls the kernels of quire.kernels.triton; decodes use the order of rows by length and shared prefixes, if the
    step has them."""

    records_decodes = records_chunks = masks_trees = sees_ahead = True

    def __init__(self) -> None:
        self._decode: Callable[..., Tensor]
        self._chunk: Callable[..., Tensor]
        self._shared: Callable[..., Tensor]
        self._prefixes: Any = None
        self._latent_decode: Callable[..., Tensor]
        self._latent_chunk: Callable[..., Tensor]

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        """Returns the rows of a shared-prefix tile; 0 for windows, sinks, soft caps and latent attention, which that
        kernel lacks."""
        from quire.kernels.triton.attention.shared_prefix import rows_per_tile

        reads_all = spec.has_window or spec.has_sinks or spec.has_softcap or spec.latent_rank
        return 0 if reads_all else rows_per_tile(spec.num_q_heads, spec.num_kv_heads)

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why the kernels cannot run, or None; the kernels are loaded at acceptance."""
        if spec.device != "cuda":
            return f"runs on CUDA, not on {spec.device}"
        package, reason = kernels.find(PACKAGE)
        if package is None:
            return str(reason)
        from quire.kernels.triton.attention.chunk_attention import chunk_attention
        from quire.kernels.triton.attention.decode_attention import decode_attention
        from quire.kernels.triton.attention.latent_blocks import latent_chunk, latent_decode
        from quire.kernels.triton.attention.shared_prefix import SharedPrefixes, shared_prefix_attention

        self._decode, self._chunk = decode_attention, chunk_attention
        self._latent_decode, self._latent_chunk = latent_decode, latent_chunk
        self._shared, self._prefixes = shared_prefix_attention, SharedPrefixes
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
        """Calls the chunk, decode or shared-prefix kernel, as the step requires; arguments as in the port.

        Steps with tree masks use the chunk kernel, even with one token a row.
        """
        tables, lens, rest = metadata.block_tables, metadata.seq_lens, (sinks, softcap, chunked)
        if not metadata.is_decode or metadata.tree_mask is not None:
            starts, masks = metadata.query_start, (metadata.tree_mask, metadata.seen_ends)
            assert starts is not None, "only steps without trees have none"
            return self._chunk(q, k_cache, v_cache, tables, starts, lens, scale, window, *rest, *masks)
        shared = metadata.prefixes
        if shared is None:
            return self._decode(q, k_cache, v_cache, tables, lens, scale, window, metadata.order, *rest)
        assert not window
        assert sinks is None
        assert not softcap
        prefixes = self._prefixes(shared.members, shared.tables, shared.lens, shared.starts)
        return self._shared(q, k_cache, v_cache, tables, lens, prefixes, scale, metadata.order)

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Calls the latent decode kernel for steps of one token a row, else the latent chunk kernel."""
        tables, lens = metadata.block_tables, metadata.seq_lens
        if metadata.is_decode:
            return self._latent_decode(q, q_rotated, cache, tables, lens, scale, metadata.order)
        return self._latent_chunk(q, q_rotated, cache, tables, metadata.query_start, lens, scale)
