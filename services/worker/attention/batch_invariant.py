"""Batch-invariant GPU attention: reductions are split by position alone (option batch_invariant)."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from quire import kernels
from quire.services.worker.attention.port import AttentionMetadata, AttentionSpec

PACKAGE = "quire.kernels.triton.batch_invariant"


class BatchInvariantAttention:
    """Attention on CUDA whose result for a row has the same bits as a decode, in a prompt, in a chunk and in any
    batch."""

    records_decodes = records_chunks = True

    def __init__(self) -> None:
        self._decode: Callable[..., Tensor]
        self._chunk: Callable[..., Tensor]

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return 0

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why the kernels cannot run, or None; the kernels are loaded at acceptance."""
        if spec.device != "cuda":
            return f"runs on CUDA, not on {spec.device}"
        package, reason = kernels.find(PACKAGE)
        if package is None:
            return str(reason)
        from quire.kernels.triton.batch_invariant.attention import chunk_attention, decode_attention

        self._decode, self._chunk = decode_attention, chunk_attention
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
        """Calls the decode kernel for steps of one token a row, else the chunk kernel; arguments as in the port."""
        tables, lens, rest = metadata.block_tables, metadata.seq_lens, (sinks, softcap, chunked)
        if metadata.is_decode:
            return self._decode(q, k_cache, v_cache, tables, lens, scale, window, metadata.order, *rest)
        return self._chunk(q, k_cache, v_cache, tables, metadata.query_start, lens, scale, window, *rest)
