"""Combines one backend for decode steps with another for steps with chunks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire.services.worker.attention.port import AttentionBackend, AttentionMetadata, AttentionSpec, LatentBackend

if TYPE_CHECKING:  # the simulated worker lists backends without torch
    from torch import Tensor


@dataclass(frozen=True)
class PerPhaseAttention:
    """Dispatches decode steps to `decode`, chunks with pictures whose tokens see each other to `ahead`, and all others
    to `chunk`; all have accepted the model."""

    decode: AttentionBackend
    chunk: AttentionBackend
    ahead: AttentionBackend | None = None  # None: there are no such pictures

    @property
    def records_decodes(self) -> bool:
        return self.decode.records_decodes

    @property
    def records_chunks(self) -> bool:
        return self._recorded_chunk.records_chunks

    @property
    def _recorded_chunk(self) -> AttentionBackend:
        """Returns the backend for chunk steps in CUDA graphs.

        Graphed steps are small, so the launches saved outweigh what the chunk backend would save.
        """
        return self.chunk if self.chunk.records_chunks else self.decode

    def rows_per_prefix_tile(self, spec: AttentionSpec) -> int:
        return self.decode.rows_per_prefix_tile(spec)

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Returns why one of the two backends cannot serve `spec`, or None."""
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
        """Attends with the backend of the step's phase."""
        backend = self._backend(metadata)
        options: dict[str, Any] = {"sinks": sinks, "softcap": softcap, "chunked": chunked}
        return backend.attend(q, k_cache, v_cache, metadata, scale=scale, window=window, **options)

    def attend_latent(
        self, q: Tensor, q_rotated: Tensor, cache: Tensor, metadata: AttentionMetadata, *, scale: float
    ) -> Tensor:
        """Computes latent attention with the backend of the step's phase; both backends must support it."""
        backend = self._backend(metadata)
        assert isinstance(backend, LatentBackend), "both have accepted the model"
        return backend.attend_latent(q, q_rotated, cache, metadata, scale=scale)

    def _backend(self, metadata: AttentionMetadata) -> AttentionBackend:
        """Returns the backend of a step: `decode` for one token a row, `ahead` for pictures, else `chunk` or, in a CUDA
        graph, the one that records chunks."""
        if metadata.seen_ends is not None and self.ahead is not None:
            return self.ahead
        chunk = self._recorded_chunk if metadata.is_recorded else self.chunk
        return self.decode if metadata.is_decode else chunk
