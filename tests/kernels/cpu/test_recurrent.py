"""Recurrent layers in C++ equal float64 token by token, with the same bits for any number of threads and chunks."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from quire.kernels.state_pages import StateShape
from tests.kernels.cpu.closeness import needs_library
from tests.kernels.states import SHAPE, Layer, run_of_everything

pytestmark = pytest.mark.skipif(**needs_library)
ODD = StateShape(16 + 12, 3, 4, 8, 3)
WIDE = StateShape(2 * 40 + 2 * 100, 4, 2, 40, 100)


@pytest.mark.parametrize("shape", [SHAPE, ODD, WIDE], ids=str)
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 2e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_any_chunking_equals_token_by_token(shape: StateShape, dtype: torch.dtype, most: float, delta: bool) -> None:
    assert run_of_everything(Layer(cpu, shape, dtype, delta=delta)) < most


def test_row_has_the_same_bits_in_any_batch_and_any_chunking() -> None:
    whole, cut = Layer(cpu), Layer(cpu)
    first, second = whole.sequence(50), cut.sequence(50)
    (expected,) = whole.compute([(first, 50)])
    beside = cut.sequence(30)
    parts = [cut.compute([(second, count), (beside, 3)])[0] for count in (1, 20, 7, 22)]
    assert torch.equal(torch.cat(parts), expected)
    page = first.table[-1]
    assert all(
        torch.equal(one[page], other[second.table[-1]])
        for one, other in zip(whole.pages.heads, cut.pages.heads, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gate_comes_behind_the_norm(dtype: torch.dtype) -> None:
    x, gates, weight = (torch.randn(size).to(dtype) for size in ((5, 3, 24), (5, 100), (24,)))
    found, expected = (package.gated_norm(x, gates[:, 28:], weight, 1e-6).float() for package in (cpu, reference))
    assert (found - expected).abs().max() <= (1e-5 if dtype == torch.float32 else 0.02) * expected.abs().max()
