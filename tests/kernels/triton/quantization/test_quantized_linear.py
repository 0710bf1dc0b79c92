"""Products with quantized weights on a GPU, or in the interpreter, against the reference."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.reference.fp8_weight import quantize_to_fp8
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from quire.kernels.triton.quantization import eight_bit_linear, packed_linear
from quire.kernels.triton.quantization.eight_bit_linear import EightBitWeight
from quire.kernels.triton.quantization.packed_many_rows import ManyRowsTile, many_rows_takes, packed_many_rows
from quire.kernels.triton.quantization.packed_weight import PackedWeight, pack
from quire.kernels.triton.single_row.row_linear import RowNorm, row_linear
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.conftest import ON_GPU
from tests.kernels.triton.quantization.weights import integers, on
from tests.kernels.triton.tuned import tune

DTYPE = torch.bfloat16 if ON_GPU else torch.float16
SLACK = 2  # weights are rounded to 16 bits before the product, too
FP8 = torch.float8_e4m3fn


def representable(x: torch.Tensor) -> torch.Tensor:
    """Creates small powers of two with a full range in every group of 128: the interpreter's cast does not round."""
    powers = torch.randint(-6, 3, x.shape).float().exp2() * x.sign()
    powers[..., ::32] = 448.0 * 0.25
    return powers.to(x)


def check(device: torch.device, x: torch.Tensor, weight: QuantizedWeight, kind: type, slack: float = SLACK) -> None:
    x, weight = x.to(device, DTYPE), on(device, weight)
    packed = triton.prepare_quantized_linear(weight, DTYPE)
    assert type(packed) is kind
    assert_close(triton.quantized_linear(x, packed), reference.quantized_linear(x.float(), weight), slack)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features", "group"),
    [(1, 128, 24, 32), (5, 256, 200, 128), (17, 96, 130, 32), (70, 384, 64, 64), (3, 1024, 40, 1024), (2, 352, 8, 32)],
)
def test_weight_only_quantization(device, tokens, in_features, out_features, group, bits):
    weight = integers(out_features, in_features, group, bits, bias=torch.randn(out_features).to(DTYPE))
    check(device, torch.randn(tokens, in_features), weight, PackedWeight)


def test_permuted_columns(device):
    weight = integers(48, 128, 32, 4, zeros=False, order=torch.randperm(128))
    check(device, torch.randn(6, 128), weight, PackedWeight)


def test_codes_that_index_a_table(device):
    weight = integers(48, 128, 64, 4, zeros=False, table=torch.randn(16))
    check(device, torch.randn(6, 128), weight, PackedWeight)


def test_signed_codes_and_8_bit_floats(device):
    codes = torch.randint(-128, 128, (40, 128)).to(torch.int8)
    scales = torch.rand(40, 1) + 0.1
    check(device, torch.randn(4, 128), QuantizedWeight(codes, scales, None, 128, 8), PackedWeight)
    floats = torch.randn(40, 128).to(FP8)
    check(device, torch.randn(4, 128), QuantizedWeight(floats, scales, None, 128, 8), PackedWeight)


@pytest.mark.parametrize("order", [None, torch.arange(128).flip(0)])
def test_many_rows_use_a_dequantized_copy(device, monkeypatch, order):
    tune(monkeypatch, "quantization.packed_linear", few_rows=8, most_rows=8, most_tiled_rows=8)
    monkeypatch.setattr(packed_linear, "packed_many_rows", None)
    for bits, group in ((4, 32), (4, 64), (8, 32)):
        check(device, torch.randn(9, 128), integers(40, 128, group, bits, order=order), PackedWeight)


def test_rows_between_few_and_many_are_multiplied_in_tiles(device, monkeypatch):
    tune(monkeypatch, "quantization.packed_linear", few_rows=8)
    tiled = Mock(side_effect=packed_many_rows)
    monkeypatch.setattr(packed_linear, "packed_many_rows", tiled)
    for bits, group in ((4, 64), (4, 32), (8, 64)):
        check(device, torch.randn(9, 128), integers(40, 128, group, bits, order=None), PackedWeight)
    assert [call.args[1].span for call in tiled.mock_calls] == [64]


@pytest.mark.parametrize("tile", [None, ManyRowsTile(128, 1), ManyRowsTile(256, 2), ManyRowsTile(128, 4)])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features", "group", "more"),
    [
        (70, 384, 130, 64, {}),
        (70, 512, 64, 512, {"zeros": False, "bias": torch.randn(64).to(DTYPE)}),
        (300, 256, 70, 128, {"bias": torch.randn(70).to(DTYPE)}),
        (65, 256, 48, 64, {"order": torch.randperm(256)}),
    ],
    ids=["zeros", "one group, bias", "several tiles", "ordered"],
)
def test_many_rows_are_multiplied_in_tiles(device, tokens, in_features, out_features, group, more, tile):
    weight = on(device, integers(out_features, in_features, group, 4, **more))
    if weight.zeros is None:
        weight = replace(weight, zeros=torch.full_like(weight.scales, 8.0))
    packed = pack(weight)
    assert many_rows_takes(packed)
    x = torch.randn(tokens, in_features).to(device, DTYPE)
    assert_close(packed_many_rows(x, packed, tile), reference.quantized_linear(x.float(), weight), SLACK)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "tile", [ManyRowsTile(128, 1), ManyRowsTile(256, 1), ManyRowsTile(128, 4), ManyRowsTile(256, 2)]
)
def test_long_sums_of_many_rows_are_the_same_every_time(device, tile):
    weight = on(device, integers(4096, 14_336, 128, 4))
    packed, x = pack(weight), torch.randn(256, 14_336, device=device, dtype=DTYPE)
    first = packed_many_rows(x, packed, tile)
    assert_close(first, reference.quantized_linear(x.float(), weight), SLACK)
    for _ in range(200):
        assert torch.equal(packed_many_rows(x, packed, tile), first)


def by_token(out_features: int, in_features: int, kind: torch.dtype, scale: torch.Tensor | None) -> QuantizedWeight:
    return QuantizedWeight(
        (torch.randn(out_features, in_features) * 30).to(kind),
        torch.rand(out_features, 1) + 0.1,
        None,
        group_size=in_features,
        bits=8,
        activations=QuantizedActivations(kind, 0, scale),
        bias=torch.randn(out_features).to(DTYPE),
    )


def by_block(out_features: int, in_features: int, kind: torch.dtype, rows: int = 1) -> QuantizedWeight:
    """Creates a weight whose scales are shared by `rows` rows."""
    scales = (torch.rand(-(-out_features // rows), -(-in_features // 128)) + 0.1) / 448
    codes = (torch.randn(out_features, in_features) * 100).to(kind)
    activations = QuantizedActivations(kind, 128)
    return QuantizedWeight(
        codes, scales.repeat_interleave(rows, 0)[:out_features], None, 128, 8, activations=activations
    )


def inputs(tokens: int, in_features: int, kind: torch.dtype) -> torch.Tensor:
    x = torch.randn(tokens, in_features)
    if kind is FP8 and not ON_GPU:
        x = representable(x)
        x[:, 0] = 448.0 * 0.25
    return x


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"), [(1, 128, 32), (17, 96, 130), (70, 384, 64), (140, 512, 128)]
)
def test_activations_in_8_bits_by_token(device, tokens, in_features, out_features, kind, static):
    scale = torch.tensor([0.25 if kind is FP8 else 0.03]) if static else None
    check(device, inputs(tokens, in_features, kind), by_token(out_features, in_features, kind, scale), EightBitWeight)


@pytest.mark.parametrize("rows", [1, 128])
@pytest.mark.parametrize("kind", [torch.int8, FP8])
@pytest.mark.parametrize(
    ("tokens", "in_features", "out_features"), [(1, 128, 32), (17, 192, 130), (70, 384, 64), (140, 512, 128)]
)
def test_activations_in_8_bits_by_block(device, tokens, in_features, out_features, kind, rows):
    check(device, inputs(tokens, in_features, kind), by_block(out_features, in_features, kind, rows), EightBitWeight)


@pytest.mark.parametrize("weight", [by_token(40, 640, FP8, None), by_token(40, 640, torch.int8, None)])
@pytest.mark.parametrize("splits", [2, 4])
def test_sums_in_parts(device, weight, splits):
    check_in_parts(device, weight, splits)


@pytest.mark.parametrize("splits", [2, 4])
def test_sums_of_blocks_in_parts(device, splits):
    check_in_parts(device, by_block(40, 640, FP8), splits)


def check_in_parts(device: torch.device, weight: QuantizedWeight, splits: int) -> None:
    x, weight = inputs(5, 640, weight.codes.dtype).to(device, DTYPE), on(device, weight)
    packed = triton.prepare_quantized_linear(weight, DTYPE)
    shape = eight_bit_linear.EightBitTile(rows=16, columns=64, splits=splits, width=128, stages=3)
    want = reference.quantized_linear(x.float(), weight)
    assert_close(eight_bit_linear.eight_bit_linear(x, packed, shape), want, SLACK)


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("in_features", "out_features"), [(256, 128), (2048, 256), (2304, 128)])
def test_single_row_with_quantized_weight(device, in_features, out_features, blocks):
    """The plain, normalised, gated and residual variants equal row_linear with the dequantized weight."""
    x, norm = torch.randn(1, in_features).to(device, DTYPE), RowNorm(torch.rand(in_features).to(device, DTYPE), 1e-5)
    factors = torch.rand(2 * out_features // 128, 1).repeat_interleave(128, 0)
    made = quantize_to_fp8(
        (torch.randn(2 * out_features, in_features) * factors).to(device, DTYPE), None, blocks=blocks
    )
    packed = triton.prepare_quantized_linear(made, DTYPE)
    normed = reference.rms_norm(x.double(), norm.weight.double(), norm.eps)
    plain, wide = x.double() @ made.dequantized().double().T, normed @ made.dequantized().double().T
    assert_close(row_linear(x, packed, pdl=ON_GPU), plain, slack=2)
    assert_close(row_linear(x, packed, norm=norm, pdl=ON_GPU), wide, slack=2)
    assert_close(row_linear(x, packed, norm=norm, gated=True, pdl=ON_GPU), reference.silu_mul(wide), slack=3)
    residual = torch.randn(1, 2 * out_features).to(device, DTYPE)
    want = residual.double() + plain
    assert_close(row_linear(x, packed, residual=residual), want, slack=2)


@pytest.mark.parametrize(
    ("in_features", "group", "more"),
    [
        (256, 128, {}),
        (2304, 64, {"zeros": False}),
        (512, 32, {"order": torch.randperm(512)}),
        (1024, 1024, {"bias": torch.randn(74)}),
    ],
    ids=["zeros", "offset alike", "ordered", "one group, bias"],
)
def test_single_row_with_4_bit_codes(device, in_features, group, more):
    """As above with 4-bit codes; 37 rows do not divide into whole programs."""
    x, norm = torch.randn(1, in_features).to(device, DTYPE), RowNorm(torch.rand(in_features).to(device, DTYPE), 1e-5)
    weight = on(device, integers(74, in_features, group, 4, **more))
    if weight.zeros is None:
        weight = replace(weight, zeros=torch.full_like(weight.scales, 8.0))
    packed = triton.prepare_quantized_linear(weight, DTYPE)
    assert isinstance(packed, PackedWeight)
    bias = 0.0 if weight.bias is None else weight.bias.double()
    normed = reference.rms_norm(x.double(), norm.weight.double(), norm.eps)
    plain, wide = (row @ weight.dequantized().double().T + bias for row in (x.double(), normed))
    assert_close(row_linear(x, packed, pdl=ON_GPU), plain, slack=2)
    assert_close(row_linear(x, packed, norm=norm, pdl=ON_GPU), wide, slack=2)
    assert_close(row_linear(x, packed, norm=norm, gated=True, pdl=ON_GPU), reference.silu_mul(wide), slack=3)
    residual = torch.randn(1, 74).to(device, DTYPE)
    want = residual.double() + plain
    assert_close(row_linear(x, packed, residual=residual), want, slack=2)


def test_fractional_zero_points_are_not_subtracted_in_16_bits(device):
    weight = integers(40, 128, 32, 4)
    weight = replace(weight, zeros=weight.zeros + 0.3)
    check(device, torch.randn(5, 128), weight, LinearWeight)


def test_float32_uses_dequantized_weights(device):
    weight = on(device, integers(40, 128, 32, 4))
    x = torch.randn(5, 128, device=device)
    packed = triton.prepare_quantized_linear(weight, torch.float32)
    assert_close(triton.quantized_linear(x, packed), reference.quantized_linear(x, weight), slack=3)


def test_weights_with_different_zero_points_share_kernels(device):
    """The first zero point of a weight is no compile-time constant of a kernel."""
    first, second = (replace(integers(40, 128, 32, 4), zeros=torch.arange(160.0).view(40, 4) % n) for n in (7, 9))
    second.zeros[0, 0] = 5.0
    assert pack(on(device, first)).zero == pack(on(device, second)).zero
    alike = pack(on(device, replace(first, zeros=torch.full((40, 4), 8.0))))
    assert (alike.zeros, alike.zero) == (None, 8.0)
