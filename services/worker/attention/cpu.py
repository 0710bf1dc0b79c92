"""Attention backend over the compiled CPU library."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire import kernels
from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec

PACKAGE = "quire.kernels.cpu"


class CpuAttention:
    """Calls quire.kernels.cpu.paged_attention; available if the library is built and the CPU has its instructions."""

    masks_trees = sees_ahead = True
    records_decodes = True
    records_chunks = False  # a tape runs steps of any size without recording each shape

    def __init__(self) -> None:
        self._library, self._reason = kernels.find(PACKAGE)
        self._attend: Callable[..., Tensor] | None = getattr(self._library, "paged_attention", None)
        self._attend_latent: Callable[..., Tensor] | None = getattr(self._library, "latent_attention", None)

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 0

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why the library cannot serve `spec` (other device, quantized cache, not built), or None."""
        if spec.device != "cpu":
            return f"runs on the CPU, not on {spec.device}"
        if spec.kv_dtype != spec.dtype:
            return f"does not support a KV cache of {spec.kv_dtype}"
        if self._library is None:
            return str(self._reason)
        return None if callable(self._attend) else f"{PACKAGE} has no paged_attention"

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
        """Calls the library's paged attention for decodes and chunks alike, including tree masks; arguments as in the
        port."""
        assert self._attend is not None
        return self._attend(
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
            metadata.seen_ends,
        )

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Calls the library's latent attention; no tree masks."""
        assert self._attend_latent is not None
        tables, starts, lens = metadata.block_tables, metadata.query_start, metadata.seq_lens
        return self._attend_latent(q, q_rotated, cache, tables, starts, lens, scale)
