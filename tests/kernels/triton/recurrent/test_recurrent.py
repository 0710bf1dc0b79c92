"""Recurrent layers in Triton equal float64 token by token, over prompts, chunks, decodes and saved states."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.state_pages import StateShape
from tests.interpreter import ON_GPU
from tests.kernels.states import SHAPE, Layer, run_of_everything
from tests.kernels.triton.tuned import tune

DEVICE = "cuda" if ON_GPU else "cpu"
SMALL = StateShape(16 + 12, 3, 4, 8, 3)
# Shapes of a rank: one head, and heads whose key heads are shared with other ranks.
ALONE = StateShape(2 * 8 + 6, 4, 1, 8, 6)
SHARED = StateShape(2 * 3 * 8 + 3 * 6, 4, 3, 8, 6)
WIDE = StateShape(2 * 40 + 2 * 40, 4, 2, 40, 40)
GRANITE = StateShape(2 * 128 + 4 * 64, 4, 4, 128, 64)
QWEN3_NEXT = StateShape(2 * 2 * 128 + 4 * 128, 4, 4, 128, 128)


@pytest.mark.parametrize(
    "shape",
    [SMALL, *(pytest.param(shape, marks=pytest.mark.slow) for shape in (ALONE, SHARED, SHAPE, WIDE))],
    ids=str,
)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_any_chunking_equals_token_by_token(shape: StateShape, delta: bool) -> None:
    assert run_of_everything(Layer(triton, shape, delta=delta)) < 5e-5


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [16, 64])
def test_chunks_may_have_any_length(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    tune(monkeypatch, "recurrent.gated_delta_rule", chunk=chunk)
    assert run_of_everything(Layer(triton, SMALL)) < 5e-5


def test_the_gate_comes_behind_the_norm() -> None:
    parts = torch.randn(5, 3, 24).to(DEVICE, torch.bfloat16), torch.randn(5, 100).to(DEVICE, torch.bfloat16)
    weight = torch.randn(24).to(DEVICE, torch.bfloat16)
    found = triton.gated_norm(parts[0], parts[1][:, 28:], weight, 1e-6)
    expected = reference.gated_norm(parts[0], parts[1][:, 28:], weight, 1e-6)
    assert (found.float() - expected.float()).abs().max() <= 0.02 * expected.float().abs().max()


def test_padding_rows_of_a_recording_write_nothing() -> None:
    layer = Layer(triton, SMALL)
    before = layer.pages.first.clone()
    row = layer.sequence(1)
    row.table = []
    x = torch.randn(2, SMALL.num_channels).to(layer.device)
    tables, lens = torch.zeros(2, 3, dtype=torch.int32, device=layer.device), torch.zeros(2, device=layer.device).int()
    where = (layer.pages, tables, None, lens, 16)
    qkv = triton.short_convolution(x, layer.weight, *where)
    gates = torch.randn(2, 4).to(layer.device)
    out = triton.gated_delta_rule(qkv, gates, gates, layer.rate, layer.bias, *where)
    assert not qkv.any()
    assert not out.any()
    assert torch.equal(before.isnan(), layer.pages.first.isnan())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_sizes_of_real_models_on_a_gpu(dtype: torch.dtype, seed: int, delta: bool) -> None:
    shape = QWEN3_NEXT if delta else GRANITE
    found = run_of_everything(Layer(triton, shape, dtype, seed, delta=delta))
    assert found < (1e-4 if dtype == torch.float32 else 2e-2)
