"""Context-parallel attention: gathers the keys and values stored by all ranks before a rank attends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata, AttentionSpec, LatentBackend

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class ContextParallelAttention:
    """Wraps `backend`, running AttentionMetadata.exchange before attention if the step has one.

    Every layer stores its own tokens' keys and values before it attends, once a step.
    """

    backend: AttentionBackend

    @property
    def records_decodes(self) -> bool:
        return self.backend.records_decodes

    @property
    def records_chunks(self) -> bool:
        return self.backend.records_chunks

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return self.backend.rows_per_prefix_tile(spec)

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        return self.backend.reject_reason(spec)

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
        """Exchanges the layer's stored keys and values between the ranks if the step is partitioned, then attends."""
        if metadata.exchange is not None:
            metadata.exchange(k_cache, v_cache)
        options: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "chunked": chunked}
        return self.backend.attend(q, k_cache, v_cache, metadata, scale=scale, window=window, **options)

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Exchanges the layer's stored latent vectors between the ranks if the step is partitioned, then attends."""
        assert isinstance(self.backend, LatentBackend), "it has accepted the model"
        if metadata.exchange is not None:
            metadata.exchange(cache)
        return self.backend.attend_latent(q, q_rotated, cache, metadata, scale=scale)
