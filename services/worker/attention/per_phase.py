"""One backend for steps in which every row has one token, another for all others, one of them for those in graphs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata, AttentionSpec, LatentBackend

if TYPE_CHECKING:  # backends are also named where there is no torch, by the simulated worker
    from torch import Tensor


@dataclass(frozen=True)
class PerPhaseAttention:
    """Both have accepted the model."""

    decode: AttentionBackend
    chunk: AttentionBackend

    @property
    def records_decodes(self) -> bool:
        return self.decode.records_decodes

    @property
    def records_chunks(self) -> bool:
        return self._recorded_chunk.records_chunks

    @property
    def _recorded_chunk(self) -> AttentionBackend:
        """In small steps, which are those in graphs, launches count for more than what the other one would save."""
        return self.chunk if self.chunk.records_chunks else self.decode

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return self.decode.rows_per_prefix_tile(spec)

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return self.decode.reject_reason(spec) or self.chunk.reject_reason(spec)

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
        backend = self._backend(metadata)
        options: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "chunked": chunked}
        return backend.attend(q, k_cache, v_cache, metadata, scale=scale, window=window, **options)

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        backend = self._backend(metadata)
        assert isinstance(backend, LatentBackend), "both have accepted the model"
        return backend.attend_latent(q, q_rotated, cache, metadata, scale=scale)

    def _backend(self, metadata: AttentionMetadata) -> AttentionBackend:
        chunk = self._recorded_chunk if metadata.is_recorded else self.chunk
        return self.decode if metadata.is_decode else chunk
