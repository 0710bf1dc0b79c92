"""Accuracy of float weights quantized to 8 bits, by row and by block."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference
from quire.kernels.reference.fp8_weight import quantize_to_fp8
from quire.kernels.reference.quantized_linear import quantize_activations
from tests.kernels.triton.closeness import error


@pytest.mark.parametrize("blocks", [False, True])
def test_error_of_8_bits(blocks: bool) -> None:
    """With normally distributed weights and activations, the relative error of the product is 3.7 %."""
    x, weight = torch.randn(64, 1024), torch.randn(512, 1024) / 32
    quantized = quantize_to_fp8(weight, None, blocks=blocks)
    assert 0.020 < error(quantized.dequantized(), weight) < 0.030
    assert 0.030 < error(reference.quantized_linear(x, quantized), x @ weight.T) < 0.042


@pytest.mark.parametrize("blocks", [False, True])
def test_small_weights_keep_precision_beside_large_ones(blocks: bool) -> None:
    weight = torch.randn(256, 256)
    weight[:128] *= 1e-6
    assert error(quantize_to_fp8(weight, None, blocks=blocks).dequantized()[:128], weight[:128]) < 0.03


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("size", [(128, 128), (130, 70)])
def test_zeros_stay_zeros(blocks: bool, size: tuple[int, int]) -> None:
    quantized = quantize_to_fp8(torch.zeros(size), None, blocks=blocks)
    assert quantized.codes.shape == size
    assert not reference.quantized_linear(torch.zeros(3, size[1]), quantized).any()
    assert quantized.activations is not None
    assert torch.isfinite(quantize_activations(torch.zeros(2, 100), quantized.activations)[0].float()).all()
