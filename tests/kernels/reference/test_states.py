"""Recurrent layers in plain torch: chunks, single tokens and saved states equal token-by-token results."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference
from quire.kernels.state_pages import StateShape
from tests.kernels.states import SHAPE, Layer, run_of_everything


@pytest.mark.parametrize(
    "shape", [SHAPE, StateShape(16 + 9, 2, 3, 8, 3), StateShape(2 * 8 + 2 * 40, 4, 2, 8, 40)], ids=str
)
@pytest.mark.parametrize("delta", [True, False], ids=["delta", "space"])
def test_any_chunking_equals_token_by_token(shape: StateShape, delta: bool) -> None:
    assert run_of_everything(Layer(reference, shape, delta=delta)) < 2e-5


def test_page_size_is_balanced() -> None:
    qwen3_next = StateShape(8192, 4, 32, 128, 128)
    assert qwen3_next.num_first == 15
    assert qwen3_next.part_words == 17 * 128 * 128
    assert StateShape(1000, 2, 1, 2, 2).part_words == 1000, "a convolution larger than all states"


def test_the_gate_comes_behind_the_norm() -> None:
    x, gate, weight = torch.randn(3, 2, 4), torch.randn(3, 8), torch.randn(4)
    out = reference.gated_norm(x, gate, weight, 1e-6)
    normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight
    assert torch.allclose(out, normed.flatten(1) * gate * gate.sigmoid(), atol=1e-6)
