"""Row-wise functions: embed, rms_norm, add_rms_norm, silu_mul."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)

SIZES = (1, 7, 16, 33, 64, 100, 256, 768, 1025)


@pytest.mark.parametrize("size", SIZES)
def test_rms_norm(dtype, size):
    x, weight = (3 * torch.randn(5, size)).to(dtype), torch.randn(size).to(dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6), units=4)


def test_rms_norm_takes_any_leading_dimensions(dtype):
    x, weight = torch.randn(3, 4, 32).to(dtype), torch.randn(32).to(dtype)
    assert_close(cpu.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5), units=4)


@pytest.mark.parametrize("size", SIZES)
def test_add_rms_norm_adds_in_place(dtype, size):
    x, residual, weight = (torch.randn(5, size).to(dtype) for _ in range(3))
    weight = weight[0].contiguous()
    theirs = residual.clone()
    want = reference.add_rms_norm(x, theirs, weight, 1e-6)
    got = cpu.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(residual, theirs)
    assert_close(got, want, units=4)


@pytest.mark.parametrize("size", SIZES)
def test_silu_mul(dtype, size):
    gate_up = (4 * torch.randn(5, 2 * size)).to(dtype)
    assert_close(cpu.silu_mul(gate_up), reference.silu_mul(gate_up), units=4)


def test_silu_of_extremes():
    gate = torch.tensor([[0.0, -0.0, 100.0, -100.0, 1e30, -1e30, float("inf"), float("nan"), -88.5, 88.5]])
    got = cpu.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1))
    torch.testing.assert_close(got, torch.nn.functional.silu(gate), rtol=3e-7, atol=1e-35, equal_nan=True)


def test_exponential_is_near_everywhere():
    gate = torch.linspace(-87, 87, 100_001).view(1, -1)
    got = cpu.silu_mul(torch.cat((gate, torch.ones_like(gate)), dim=1)).double()
    exact = torch.nn.functional.silu(gate.double())
    assert ((got - exact).abs() / exact.abs().clamp(min=1e-37)).max() < 4 * 2.0**-23


@pytest.mark.parametrize("ids_dtype", [torch.int32, torch.int64])
def test_embed(dtype, ids_dtype):
    table = torch.randn(50, 37).to(dtype)
    ids = torch.randint(0, 50, (300,), dtype=ids_dtype)
    assert torch.equal(cpu.embed(ids, table), reference.embed(ids, table))


def test_float16_goes_to_the_reference():
    x, weight = torch.randn(4, 64).half(), torch.randn(64).half()
    assert torch.equal(cpu.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    assert torch.equal(cpu.silu_mul(x), reference.silu_mul(x))
    ours, theirs = x.clone(), x.clone()
    assert torch.equal(cpu.add_rms_norm(x, ours, weight, 1e-6), reference.add_rms_norm(x, theirs, weight, 1e-6))
    assert torch.equal(cpu.embed(torch.tensor([3, 1]), x), x[[3, 1]])


def test_a_row_has_the_same_bits_in_any_batch_on_any_threads(dtype):
    x, residual = torch.randn(500, 520).to(dtype), torch.randn(500, 520).to(dtype)
    weight = torch.randn(520).to(dtype)

    def compute(rows: slice):
        x_rows, residual_rows = x[rows].clone(), residual[rows].clone()
        return (
            cpu.rms_norm(x_rows, weight, 1e-6),
            cpu.add_rms_norm(x_rows, residual_rows, weight, 1e-6),
            cpu.silu_mul(x_rows),
        )

    cpu.set_num_threads(1)
    whole = compute(slice(0, 500))
    cpu.set_num_threads(3)
    for rows in (slice(0, 500), slice(0, 1), slice(17, 400), slice(499, 500)):
        for part, full in zip(compute(rows), whole, strict=True):
            assert torch.equal(part, full[rows])
