"""Fused functions for one sequence against the functions they replace."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton.single_row.row_attention import row_attention
from quire.kernels.triton.single_row.row_linear import RowNorm, RowTile, row_linear
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.paged import Case

EPS = 1e-5


def normal(device, dtype, *shape):
    return torch.randn(shape).to(device, dtype)


def weight_of(device, dtype, out_features, in_features, bias=False):
    weight = normal(device, dtype, out_features, in_features) * in_features**-0.5
    return LinearWeight(weight, normal(device, dtype, out_features) if bias else None)


def exact(x, weight, norm=None, gated=False):
    x = x.double() if norm is None else reference.rms_norm(x.double(), norm.weight.double(), norm.eps)
    bias = None if weight.bias is None else weight.bias.double()
    y = reference.linear(x, LinearWeight(weight.weight.double(), bias))
    return reference.silu_mul(y) if gated else y


@pytest.mark.parametrize(
    ("in_features", "out_features"), [(256, 48), (1024, 13), (2048, 64), (3072, 20), (4352, 8), (8192, 6)]
)
@pytest.mark.parametrize("bias", [False, True])
def test_products(dtype, device, in_features, out_features, bias):
    x, norm = normal(device, dtype, 1, in_features), RowNorm(normal(device, dtype, in_features), EPS)
    weight = weight_of(device, dtype, out_features, in_features, bias)
    assert_close(row_linear(x, weight, pdl=ON_GPU), exact(x, weight), slack=2)
    assert_close(row_linear(x, weight, norm=norm, pdl=ON_GPU), exact(x, weight, norm), slack=2)
    residual = normal(device, dtype, 1, out_features)
    want = residual.double() + exact(x, weight)
    got = row_linear(x, weight, residual=residual)
    assert got is residual
    assert_close(got, want, slack=2)


def test_the_gate(dtype, device):
    x, norm = normal(device, dtype, 1, 512), RowNorm(normal(device, dtype, 512), EPS)
    weight = weight_of(device, dtype, 2 * 37, 512, bias=True)
    assert_close(row_linear(x, weight, norm=norm, gated=True, pdl=ON_GPU), exact(x, weight, norm, gated=True), slack=2)


@pytest.mark.parametrize("shape", [RowTile(2, 256, 1, 1), RowTile(8, 512, 2, 2), RowTile(16, 1024, 2, 8)])
def test_launch_shapes_change_results_little(dtype, device, shape):
    x, weight = normal(device, dtype, 1, 2048), weight_of(device, dtype, 40, 2048)
    assert_close(row_linear(x, weight, shape=shape), exact(x, weight), slack=2)


@pytest.mark.parametrize("window", [0, 70])
@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 32, 16), (2, 1, 128, 64)])
@pytest.mark.parametrize("seq_len", [1, 65, 290])
def test_attention_from_the_product(dtype, device, seq_len, q_heads, kv_heads, head_dim, block_size, normed, window):
    case = Case([seq_len, 30], (q_heads, kv_heads), head_dim, block_size, dtype, device)
    rows = [(0, seq_len - 1, seq_len), (1, 29, 30)]
    _, k, v, tables, start, lens = case.step(rows)
    qkv = normal(device, dtype, 2, (q_heads + 2 * kv_heads) * head_dim)
    weights = [normal(device, dtype, head_dim) if normed else None for _ in range(2)]
    cos_sin = torch.randn(max(seq_len, 30), head_dim).to(device)
    last = (lens - 1).long()
    slots = (tables[torch.arange(2), last // block_size] * block_size + last % block_size).int()
    wanted_k, wanted_v = k.clone(), v.clone()
    q = reference.qk_norm_rope_store(
        qkv, *weights, EPS, cos_sin, lens - 1, slots, wanted_k, wanted_v, q_heads, kv_heads
    )
    want = reference.paged_attention(q, wanted_k, wanted_v, tables, start, lens, case.scale, window)
    got = row_attention(qkv, *weights, EPS, cos_sin, slots, k, v, tables, lens, q_heads, case.scale, window, pdl=ON_GPU)
    assert_close(got, want.flatten(1), slack=2)
    places = slots.long()
    for found, wanted in ((k, wanted_k), (v, wanted_v)):
        assert_close(found.flatten(0, 1)[places], wanted.flatten(0, 1)[places], slack=1.5)
        found.flatten(0, 1)[places] = wanted.flatten(0, 1)[places]
        assert torch.equal(found.nan_to_num(7.0), wanted.nan_to_num(7.0))


@pytest.mark.gpu
def test_long_sequences(device):
    for seq_len in (2049, 5000):
        test_attention_from_the_product(torch.bfloat16, device, seq_len, 32, 8, 128, 64, True, 0)
