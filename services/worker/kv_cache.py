"""The memory that holds keys and values of all blocks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from services.worker.block_copies import BlockCopies
from services.worker.kv_memory import BlockShape
from services.worker.layers.placement import Tensor
from services.worker.sampling.component import upload

CACHE_LINE = 64
HUGE_PAGE = 2 << 20


@dataclass(frozen=True, slots=True)
class LayerCache:
    """One layer's share, each [num_blocks, block_size, num_kv_heads, head_dim]."""

    k: Tensor
    v: Tensor


def allocate(shape: BlockShape, num_blocks: int, device: Any) -> list[LayerCache]:
    """By layer, filled with zeros: kernels may load unused places, where a stray NaN would spread."""
    size = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
    zeros = _host_zeros if device.type == "cpu" else torch.zeros
    return [
        LayerCache(zeros(size, dtype=shape.dtype, device=device), zeros(size, dtype=shape.dtype, device=device))
        for _ in range(shape.num_layers)
    ]


def copy_blocks(caches: list[LayerCache], copies: BlockCopies) -> None:
    device = caches[0].k.device
    sources, targets = (upload(ids, device, np.int64) for ids in (copies.sources, copies.targets))
    for cache in caches:
        for part in (cache.k, cache.v):
            part.index_copy_(0, targets, part.index_select(0, sources))


def _host_zeros(size: tuple[int, ...], *, dtype: Any, device: Any) -> Tensor:
    """Pages that the system hands out, zeroed, when they are first used: torch.zeros takes 2 s for each GiB.

    Aligned to huge pages where there is room for one: what lies before the first comes in small ones, which made a
    prompt of 128 tokens on a fresh cache of Qwen3-0.6B wait 30 ms for 3,600 of them.
    """
    from kernels import cpu

    num_bytes = math.prod(size) * dtype.itemsize
    alignment = HUGE_PAGE if num_bytes >= HUGE_PAGE else CACHE_LINE
    memory = np.zeros(num_bytes + alignment, dtype=np.uint8)
    start = -memory.ctypes.data % alignment
    return cpu.prefer_huge_pages(torch.from_numpy(memory[start : start + num_bytes])).view(dtype).view(size)
