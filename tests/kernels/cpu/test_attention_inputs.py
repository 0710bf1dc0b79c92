from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)


def inputs(rows: int, q_heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, normed: bool):
    angles = torch.arange(200).unsqueeze(1) * 10000 ** (-torch.arange(head_dim // 2) / (head_dim // 2))
    qkv = torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim).to(dtype)
    weights = [torch.rand(head_dim).to(dtype) + 0.5 if normed else None for _ in range(2)]
    positions = torch.randint(0, 200, (rows,), dtype=torch.int32)
    slots = 7 + torch.randperm(9 * 7 - 7)[:rows].int()
    caches = [torch.randn(9, 7, kv_heads, head_dim).to(dtype) for _ in range(2)]
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=1)
    return qkv, *weights, 1e-6, cos_sin, positions, slots, *caches, q_heads, kv_heads


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(1, 1), (6, 2), (8, 1)])
@pytest.mark.parametrize("head_dim", [2, 16, 24, 32, 64, 80, 96, 128, 256])
def test_is_the_reference(dtype, head_dim, q_heads, kv_heads, normed):
    ours = inputs(13, q_heads, kv_heads, head_dim, dtype, normed)
    theirs = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in ours)
    got, want = cpu.qk_norm_rope_store(*ours), reference.qk_norm_rope_store(*theirs)
    assert got.shape == (13, q_heads, head_dim)
    assert_close(got, want, units=6)
    assert_close(ours[7], theirs[7], units=6)
    assert torch.equal(ours[8], theirs[8])


def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(dtype):
    def compute(rows: slice, threads: int):
        torch.manual_seed(1)
        qkv, qw, kw, eps, cos_sin, positions, slots, k, v, *heads = inputs(50, 8, 2, 96, dtype, True)
        cpu.set_num_threads(threads)
        qkv, positions, slots = qkv[rows], positions[rows], slots[rows]
        q = cpu.qk_norm_rope_store(qkv, qw, kw, eps, cos_sin, positions, slots, k, v, *heads)
        return q, k.flatten(0, 1)[slots], v.flatten(0, 1)[slots]

    whole = compute(slice(0, 50), 1)
    for rows in (slice(0, 50), slice(3, 4), slice(10, 47)):
        for part, full in zip(compute(rows, 2), whole, strict=True):
            assert torch.equal(part, full[rows])


@pytest.mark.parametrize(("dtype_in", "cache"), [(torch.float16, torch.float16), (torch.float32, torch.bfloat16)])
def test_other_dtypes_go_to_the_reference(dtype_in, cache):
    ours = list(inputs(5, 4, 2, 32, dtype_in, True))
    ours[7], ours[8] = ours[7].to(cache), ours[8].to(cache)
    theirs = tuple(value.clone() if isinstance(value, torch.Tensor) else value for value in ours)
    assert torch.equal(cpu.qk_norm_rope_store(*ours), reference.qk_norm_rope_store(*theirs))
    assert torch.equal(ours[7], theirs[7])
