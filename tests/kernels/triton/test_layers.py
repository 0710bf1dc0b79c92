from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from tests.kernels.triton.closeness import assert_close

SIZES = [(1, 1), (5, 48), (3, 1000), (2, 4096), (9, 1024)]


def normal(device, dtype, *shape):
    return torch.randn(shape).to(device, dtype)


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_rms_norm(dtype, device, rows, size):
    x, weight = normal(device, dtype, rows, size), normal(device, dtype, size)
    want = reference.rms_norm(x.double(), weight.double(), 1e-5)
    assert_close(triton.rms_norm(x, weight, 1e-5), want)
    heads = normal(device, dtype, rows, 3, size)
    assert_close(triton.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads.double(), weight.double(), 1e-5))


@pytest.mark.parametrize(("rows", "size"), SIZES)
def test_add_rms_norm(dtype, device, rows, size):
    x, residual, weight = (normal(device, dtype, *s) for s in ((rows, size), (rows, size), (size,)))
    kept = residual.clone()
    got = triton.add_rms_norm(x, residual, weight, 1e-5)
    want = reference.add_rms_norm(x, kept, weight, 1e-5)
    assert torch.equal(residual, kept)
    assert_close(got, want, slack=1.5)  # the reference rounds once more


@pytest.mark.parametrize(("rows", "size"), [(1, 1), (3, 88), (2, 1025), (5, 3072)])
def test_silu_mul(dtype, device, rows, size):
    gate_up = normal(device, dtype, rows, 2 * size)
    assert_close(triton.silu_mul(gate_up), reference.silu_mul(gate_up.double()))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim"), [(1, 1, 64), (6, 2, 16), (5, 5, 80), (3, 1, 96), (16, 8, 128), (2, 1, 256)]
)
def test_qk_norm_rope_store(dtype, device, q_heads, kv_heads, head_dim, normed):
    rows, block_size, num_blocks = 7, 16, 3
    qkv = normal(device, dtype, rows, (q_heads + 2 * kv_heads) * head_dim)
    weights = [normal(device, dtype, head_dim) if normed else None for _ in range(2)]
    cos_sin = torch.randn(50, head_dim).to(device)
    positions = torch.randint(0, 50, (rows,), dtype=torch.int32).to(device)
    places = torch.randperm(block_size * num_blocks)[:rows].int().to(device)
    size = (num_blocks, block_size, kv_heads, head_dim)
    caches = [[normal(device, dtype, *size)] * 2 for _ in range(2)]
    got_k, got_v, want_k, want_v = (cache.clone() for pair in zip(*caches, strict=True) for cache in pair)
    inputs = 1e-5, cos_sin, positions, places
    got = triton.qk_norm_rope_store(qkv, *weights, *inputs, got_k, got_v, q_heads, kv_heads)
    want = reference.qk_norm_rope_store(qkv, *weights, *inputs, want_k, want_v, q_heads, kv_heads)
    assert got.dtype is dtype
    assert_close(got, want, slack=1.5)
    assert_close(got_k, want_k, slack=1.5)
    assert torch.equal(got_v, want_v)
