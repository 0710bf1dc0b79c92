"""KV of accepted drafts is moved to its places in all layers, with contiguous and separate memory."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels.reference.attention.kv_dtype import FP8
from quire.services.worker.kv.kv_cache import LayerCache, move_tokens

BLOCKS, BLOCK_SIZE = 5, 4
SOURCES, TARGETS = np.array([6, 7, 13], dtype=np.int32), np.array([5, 6, 12], dtype=np.int32)  # one is both


def caches_of(dtype: torch.dtype, size: int, *, in_one_piece: bool) -> list[LayerCache]:
    """Caches of two layers with two heads of `size` elements."""
    shape = (4, BLOCKS, BLOCK_SIZE, 2, size)
    whole = torch.randint(1, 100, shape).float().to(dtype)
    words = whole.flatten(2).view(torch.int64) if in_one_piece else None
    return [LayerCache(whole[part], whole[part + 1], words) for part in (0, 2)]


@pytest.mark.parametrize("in_one_piece", [True, False])
@pytest.mark.parametrize(
    ("dtype", "size"), [(torch.float32, 8), (torch.bfloat16, 8), (torch.bfloat16, 1), (FP8, 16), (FP8, 2)]
)
def test_tokens_move_in_all_layers(dtype: torch.dtype, size: int, in_one_piece: bool) -> None:
    """Also where a token's bytes are no multiple of a word."""
    caches = caches_of(dtype, size, in_one_piece=in_one_piece)
    parts = [part for cache in caches for part in cache.parts]
    wanted = [part.float().flatten(0, 1) for part in parts]
    for rows in wanted:
        rows[TARGETS] = rows[SOURCES]
    move_tokens(caches, SOURCES, TARGETS)
    for part, rows in zip(parts, wanted, strict=True):
        assert torch.equal(part.float().flatten(0, 1), rows)
