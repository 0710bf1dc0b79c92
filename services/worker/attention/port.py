"""What the model asks of an attention implementation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

Tensor = Any


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What a model needs of attention on a device. One backend serves all layers."""

    device: str  # "cpu" or "cuda"
    dtype: str  # of queries and cache: "float32", "bfloat16", "float16"
    head_dim: int
    num_q_heads: int
    num_kv_heads: int
    block_size: int
    has_window: bool  # some layer has a sliding window


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the rows of a step stand. All int32, on the device."""

    block_tables: Tensor  # [num_rows, width]
    query_start: Tensor  # [num_rows + 1]
    seq_lens: Tensor  # [num_rows], the step's tokens included


class AttentionBackend(Protocol):
    """Attends to keys and values in blocks; they are stored before it is called."""

    def reject_reason(self, spec: AttentionSpec) -> str | None:
        """Why this one cannot serve `spec` on this machine, or None."""

    def attend(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, metadata: AttentionMetadata, *, scale: float, window: int
    ) -> Tensor:
        """q [num_tokens, num_q_heads, head_dim], caches [num_blocks, block_size, num_kv_heads, head_dim] -> like q.

        window: positions a row sees at most, itself included; 0: all.
        """
