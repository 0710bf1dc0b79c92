"""Small functions against their formulas."""

from __future__ import annotations

import pytest
import torch

from quire import kernels
from quire.kernels import reference
from quire.kernels.reference.linear import LARGE_ELEMENTS, PART_ROWS

MAX_ERROR = {torch.float32: 1e-6, torch.bfloat16: 0.02}
dtypes = pytest.mark.parametrize("dtype", MAX_ERROR)


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@dtypes
def test_rms_norm(dtype: torch.dtype) -> None:
    x, weight = randn(5, 37, dtype=dtype), randn(37, dtype=dtype)
    wide = x.double()
    expected = wide / (wide.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight.double()
    found = reference.rms_norm(x, weight, 1e-5)
    assert found.dtype is dtype
    assert (found - expected).abs().max() < MAX_ERROR[dtype] * 4


@dtypes
def test_add_rms_norm_updates_the_residual(dtype: torch.dtype) -> None:
    x, residual, weight = randn(5, 37, dtype=dtype), randn(37, 5, dtype=dtype).t().contiguous(), randn(37, dtype=dtype)
    total = x + residual
    found = reference.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(found, reference.rms_norm(total, weight, 1e-5))


@dtypes
def test_silu_mul(dtype: torch.dtype) -> None:
    gate_up = randn(4, 26, dtype=dtype)
    gate, up = gate_up.double().chunk(2, dim=1)
    found = reference.silu_mul(gate_up)
    assert (found - gate * gate.sigmoid() * up).abs().max() < MAX_ERROR[dtype] * 4


@pytest.mark.parametrize("bias", [False, True])
def test_linear(bias: bool) -> None:
    x, weight = randn(3, 11), randn(7, 11)
    offset = randn(7) if bias else None
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    found = reference.linear(x, reference.prepare_linear(weight, offset))
    assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("out_features", [PART_ROWS, PART_ROWS + 1, 2 * PART_ROWS + 17])
@pytest.mark.parametrize("rows", [0, 1, 2, 33])
@pytest.mark.parametrize("bias", [False, True])
def test_large_weights(bias: bool, rows: int, out_features: int) -> None:
    """Covers both sides of the size above which weights are multiplied in parts."""
    in_features = LARGE_ELEMENTS // PART_ROWS
    x, weight = randn(rows, in_features), randn(out_features, in_features) * in_features**-0.5
    offset = randn(out_features) if bias else None
    packed = reference.prepare_linear(weight, offset)
    expected = x.double() @ weight.double().t() + (0 if offset is None else offset.double())
    found = reference.linear(x, packed)
    assert (found.shape, found.dtype) == (expected.shape, x.dtype)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=1e-5)
    weight[-1] = 0  # in-place update, as when a worker's weights are replaced
    last = 0 if offset is None else offset[-1]
    assert (reference.linear(x, packed)[:, -1] == last).all()


def test_embed() -> None:
    table = randn(9, 4)
    ids = torch.tensor([8, 0, 8], dtype=torch.int32)
    assert torch.equal(reference.embed(ids, table), table[[8, 0, 8]])


def test_load_takes_each_function_from_the_first_package_that_has_it() -> None:
    ops = kernels.load("cpu", ("kernels.nowhere", "quire.kernels.reference"))
    assert set(ops.sources.values()) == {"quire.kernels.reference"}
    assert set(ops.sources) == set(kernels.FUNCTIONS)
    assert "kernels.nowhere" in ops.refused
