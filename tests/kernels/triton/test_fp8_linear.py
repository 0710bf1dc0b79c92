"""Products in 8-bit floats, against the reference and, in it, against what they stand for."""

from __future__ import annotations

import pytest
import torch

from kernels import reference, triton
from kernels.reference.fp8_linear import quantize_tokens
from kernels.triton.row_linear import Norm, row_linear
from tests.kernels.triton.closeness import assert_close, error
from tests.kernels.triton.conftest import ON_GPU

SIZES = [(1, 128, 32), (5, 256, 200), (17, 96, 130), (70, 384, 64), (130, 128, 256)]  # tokens, in, out features


def representable(x: torch.Tensor) -> torch.Tensor:
    """Small powers of two with a full range in every group of 128: the interpreter's cast does not round."""
    powers = torch.randint(-6, 3, x.shape).float().exp2() * x.sign()
    powers[..., ::32] = 448.0 * 0.25
    return powers.to(x)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("tokens", "in_features", "out_features"), SIZES)
def test_products(dtype, device, tokens, in_features, out_features, bias, blocks):
    x, weight = torch.randn(tokens, in_features), torch.randn(out_features, in_features)
    if blocks:
        weight *= torch.rand(-(-out_features // 128), 1).repeat_interleave(128, 0)[:out_features] * 9
    x = (x if ON_GPU else representable(x)).to(device, dtype)
    added = torch.randn(out_features).to(device, dtype) if bias else None
    packed = reference.prepare_fp8_linear(weight.to(device, dtype), added, blocks=blocks)
    want = reference.fp8_linear(x.double().float(), packed)
    # the tensor cores keep about 14 bits of a sum of 128 products
    assert_close(triton.fp8_linear(x, packed), want, slack=2 if dtype is not torch.float32 else 100)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(256, 128), (2048, 256), (4352, 128)])
def test_a_single_row_meets_the_weight_as_it_is(dtype, device, in_features, out_features, blocks):
    """Plain, normed, gated, added: what row_linear is with the weight widened."""
    x, norm = torch.randn(1, in_features).to(device, dtype), Norm(torch.rand(in_features).to(device, dtype), 1e-5)
    weight = torch.randn(2 * out_features, in_features) * torch.rand(2 * out_features // 128, 1).repeat_interleave(
        128, 0
    )
    packed = reference.prepare_fp8_linear(weight.to(device, dtype), None, blocks=blocks)
    normed = reference.rms_norm(x.double(), norm.weight.double(), norm.eps)
    plain, wide = x.double() @ packed.widened().double().T, normed @ packed.widened().double().T
    assert_close(row_linear(x, packed, pdl=ON_GPU), plain, slack=2)
    assert_close(row_linear(x, packed, norm=norm, pdl=ON_GPU), wide, slack=2)
    assert_close(row_linear(x, packed, norm=norm, gated=True, pdl=ON_GPU), reference.silu_mul(wide), slack=3)
    residual = torch.randn(1, 2 * out_features).to(device, dtype)
    want = residual.double() + plain
    assert_close(row_linear(x, packed, residual=residual), want, slack=2)


@pytest.mark.parametrize("blocks", [False, True])
def test_what_8_bits_cost(blocks):
    """Weights and activations of a normal distribution: 3.7 % of the product, which is their two errors together."""
    x, weight = torch.randn(64, 1024), torch.randn(512, 1024) / 32
    packed = reference.prepare_fp8_linear(weight, None, blocks=blocks)
    assert 0.020 < error(packed.widened(), weight) < 0.030
    assert 0.030 < error(reference.fp8_linear(x, packed), x @ weight.T) < 0.042


def test_blocks_keep_small_weights_beside_large_ones():
    weight = torch.randn(256, 256)
    weight[:128] *= 1e-6
    one, many = (reference.prepare_fp8_linear(weight, None, blocks=blocks) for blocks in (False, True))
    assert error(one.widened()[:128], weight[:128]) > 0.2
    assert error(many.widened()[:128], weight[:128]) < 0.03


def test_zeros_stay_zeros():
    packed = reference.prepare_fp8_linear(torch.zeros(128, 128), None, blocks=True)
    assert not reference.fp8_linear(torch.zeros(3, 128), packed).any()
    assert torch.isfinite(quantize_tokens(torch.zeros(2, 100))[0].float()).all()
