"""8-bit float KV cache: stored values equal the reference's, and attention reads exactly those."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.attention.kv_dtype import FP8, to_cache
from quire.kernels.triton.attention.shared_prefix import rows_per_tile, shared_prefix_attention
from quire.kernels.triton.single_row.row_attention import row_attention
from tests.kernels.triton.attention.test_shared_prefix import grouped, share
from tests.kernels.triton.closeness import assert_close, error
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.paged import Case, Rows

SHAPES = [(6, 2, 16, 4), (2, 1, 80, 32), (8, 2, 128, 64), (2, 1, 256, 256)]  # q heads, kv heads, head_dim, block_size


def step_of(case: Case, rows: Rows) -> list[torch.Tensor]:
    """Returns arguments with an 8-bit cache; `case` gets the dequantized values."""
    q, k, v, *rest = case.step(rows)
    stored = [to_cache(cache, torch.empty(0, dtype=FP8)) for cache in (k, v)]
    case.paged.k_cache, case.paged.v_cache = (cache.to(q.dtype).cpu() for cache in stored)
    return [q, *stored, *rest]


@pytest.mark.parametrize("window", [0, 50])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_attention(dtype, device, q_heads, kv_heads, head_dim, block_size, window):
    for rows in ([(0, 0, 1), (1, 149, 150), (2, 63, 64)], [(0, 0, 1), (1, 100, 150), (2, 0, 64)]):
        case = Case([1, 150, 64], (q_heads, kv_heads), head_dim, block_size, dtype, device)
        arguments = step_of(case, rows)
        want = case.exact(rows, window)
        assert_close(triton.paged_attention(*arguments, case.scale, window), want, slack=2)
        assert_close(reference.paged_attention(*arguments, case.scale, window), want, slack=2)


def test_shared_prefixes(dtype, device):
    lens = [140, 133, 150, 20]
    case = Case(lens, (4, 2), 32, 16, dtype, device)
    share(case, (0, 1, 2), 8)
    rows = [(i, n - 1, n) for i, n in enumerate(lens)]
    q, k, v, tables, _, seq_lens = step_of(case, rows)
    prefixes = grouped(device, {(0, 1, 2): 128}, len(lens), min(rows_per_tile(4, 2), 2))
    got = shared_prefix_attention(q, k, v, tables, seq_lens, prefixes, case.scale)
    assert_close(got, case.exact(rows), slack=2)


def unrounded(qkv: torch.Tensor, num_positions: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Creates inputs that need no rounding: the interpreter's cast loses carries."""
    cos_sin = torch.cat((torch.ones(num_positions, head_dim // 2), torch.zeros(num_positions, head_dim // 2)), 1)
    return to_cache(qkv, torch.empty(0, dtype=FP8)).to(qkv.dtype), cos_sin.to(qkv.device)


@pytest.mark.parametrize("normed", [True, False])
def test_storing(dtype, device, normed):
    if normed and not ON_GPU:
        pytest.skip("the interpreter does not round to 8 bits")
    rows, q_heads, kv_heads, head_dim = 7, 6, 2, 32
    qkv, cos_sin = 20 * torch.randn(rows, (q_heads + 2 * kv_heads) * head_dim).to(device, dtype), None
    if ON_GPU:
        cos_sin = torch.randn(50, head_dim).to(device)
    else:
        qkv, cos_sin = unrounded(qkv, 50, head_dim)
    qkv[3] *= 128  # beyond the largest value
    weights = [torch.rand(head_dim).to(device, dtype) if normed else None for _ in range(2)]
    places = torch.randperm(48)[:rows].int().to(device)
    inputs = 1e-5, cos_sin, torch.arange(rows, dtype=torch.int32, device=device), places
    caches = [torch.zeros(3, 16, kv_heads, head_dim, dtype=FP8, device=device) for _ in range(4)]
    got = triton.qk_norm_rope_store(qkv, *weights, *inputs, *caches[:2], q_heads, kv_heads)
    want = reference.qk_norm_rope_store(qkv, *weights, *inputs, *caches[2:], q_heads, kv_heads)
    assert_close(got, want, slack=1.5)
    assert caches[1].float().abs().max() == 448
    assert torch.equal(caches[1].float(), caches[3].float())
    assert error(caches[0].float(), caches[2].float()) < 0.01  # keys may have been rounded to an adjacent value before


def test_a_single_row(dtype, device):
    case = Case([90, 30], (4, 2), 32, 16, dtype, device)
    rows = [(0, 89, 90), (1, 29, 30)]
    _, k, v, tables, start, lens = step_of(case, rows)
    qkv, cos_sin = torch.randn(2, 8 * 32).to(device, dtype), torch.randn(90, 32).to(device)
    if not ON_GPU:
        qkv, cos_sin = unrounded(qkv, 90, 32)
    last = (lens - 1).long()
    slots = (tables[torch.arange(2), last // 16] * 16 + last % 16).int()
    other_k, other_v = k.clone(), v.clone()
    q = reference.qk_norm_rope_store(qkv, None, None, 1e-5, cos_sin, lens - 1, slots, other_k, other_v, 4, 2)
    want = reference.paged_attention(q, other_k, other_v, tables, start, lens, case.scale, 0)
    got = row_attention(qkv, None, None, 1e-5, cos_sin, slots, k, v, tables, lens, 4, case.scale, 0)
    places = slots.long()
    assert error(k.float().flatten(0, 1)[places], other_k.float().flatten(0, 1)[places]) < 0.01
    assert error(got, want.flatten(1)) < 0.01


def test_error_of_8_bits():
    """Checks the error stated in kernels/reference/attention/kv_dtype.py."""
    x = torch.randn(100_000)
    assert 0.024 < error(to_cache(x, torch.empty(0, dtype=FP8)).float(), x) < 0.028
