"""Rotation of heads in place equals plain torch."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from tests.kernels.triton.closeness import assert_close


@pytest.mark.parametrize(
    ("num_tokens", "heads", "head_dim"), [(1, 1, 2), (5, 3, 24), (7, 16, 80), (3, 20, 64), (0, 2, 8)]
)
def test_queries_and_keys_of_one_projection(
    num_tokens: int, heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Values, which lie between the queries and keys of two tokens, stay as they are."""
    qkv = torch.randn(num_tokens, 3, heads, head_dim).to(dtype).to(device)
    angles = torch.randn(num_tokens, head_dim // 2)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1).to(device)
    wanted = qkv.float().cpu()
    reference.rotate_pairs(wanted[:, :2], cos_sin.cpu())
    triton.rotate_pairs(qkv[:, :2], cos_sin)
    assert_close(qkv, wanted)
