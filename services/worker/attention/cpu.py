"""Attention by the compiled CPU library."""

from __future__ import annotations

import kernels
from services.worker.attention.port import AttentionMetadata, AttentionSpec, Tensor

PACKAGE = "kernels.cpu"


class CpuAttention:
    """kernels.cpu.paged_attention, where the library is built and the CPU has its instructions."""

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        if spec.device != "cpu":
            return f"runs on the CPU, not on {spec.device}"
        library, reason = kernels.find(PACKAGE)
        if library is None:
            return str(reason)
        return None if callable(getattr(library, "paged_attention", None)) else f"{PACKAGE} has no paged_attention"

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, *, scale: float, window: int
    ) -> Tensor:
        from kernels import cpu

        return cpu.paged_attention(
            q, k_cache, v_cache, metadata.block_tables, metadata.query_start, metadata.seq_lens, scale, window
        )
