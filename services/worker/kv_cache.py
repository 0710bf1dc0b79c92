"""The memory that holds keys and values of all blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from services.worker.kv_memory import BlockShape
from services.worker.layers.placement import Tensor


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


def allocate(shape: BlockShape, num_blocks: int, dtype: Any, device: Any) -> list[LayerCache]:
    """By layer, filled with zeros: kernels may load unused places, where a stray NaN would spread."""
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    return [
        LayerCache(torch.zeros(size, dtype=dtype, device=device), torch.zeros(size, dtype=dtype, device=device))
        for _ in range(shape.num_layers)
    ]
