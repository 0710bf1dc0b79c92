"""One backend for steps in which every row has one token, another for all others."""

from __future__ import annotations

from dataclasses import dataclass

from services.worker.attention.port import AttentionBackend, AttentionMetadata, AttentionSpec, Tensor


@dataclass(frozen=True)
class ByPhase:
    """Both have accepted the model."""

    decode: AttentionBackend
    chunk: AttentionBackend

    @property
    def records_decodes(self) -> bool:
        return self.decode.records_decodes

    @property
    def records_chunks(self) -> bool:
        return self.chunk.records_chunks

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return self.decode.rows_per_prefix_tile(spec)

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return self.decode.reject_reason(spec) or self.chunk.reject_reason(spec)

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, *, scale: float, window: int
    ) -> Tensor:
        backend = self.decode if metadata.is_decode else self.chunk
        return backend.attend(q, k_cache, v_cache, metadata, scale=scale, window=window)
