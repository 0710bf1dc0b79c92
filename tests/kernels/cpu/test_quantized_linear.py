"""Products with quantized weights against their dequantized values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from quire.kernels import cpu
from quire.kernels.cpu.quantized_layers import PackedCodes, PackedEightBits
from quire.kernels.cpu.tape import Tape
from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from quire.kernels.reference.quantized_linear import quantized_linear as reference
from tests.kernels.cpu.closeness import assert_close, needs_library

pytestmark = pytest.mark.skipif(**needs_library)

ROWS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 130)
BFLOAT16 = torch.bfloat16
FP8 = torch.float8_e4m3fn


def integers(out_features: int, in_features: int, group: int, bits: int, **more: object) -> QuantizedWeight:
    codes = torch.randint(2**bits, (out_features, in_features)).to(torch.uint8)
    groups = in_features // group
    scales = (torch.rand(out_features, groups) + 0.1) / 2**bits
    zeros = torch.randint(2**bits, (out_features, groups)).float()
    return QuantizedWeight(codes, scales, zeros, group, bits, **more)


def symmetric(weight: QuantizedWeight) -> QuantizedWeight:
    middle = torch.full_like(weight.scales, 2 ** (weight.bits - 1))
    return QuantizedWeight(weight.codes, weight.scales, middle, weight.group_size, weight.bits)


def signed(out_features: int, in_features: int) -> QuantizedWeight:
    codes = torch.randint(-128, 128, (out_features, in_features)).to(torch.int8)
    return QuantizedWeight(codes, torch.rand(out_features, 1) / 100, None, in_features, 8)


def floats(out_features: int, in_features: int) -> QuantizedWeight:
    scales = torch.rand(out_features, in_features // 32) / 10
    return QuantizedWeight(torch.randn(out_features, in_features).to(FP8), scales, None, 32, 8)


def table(out_features: int, in_features: int) -> QuantizedWeight:
    codes = torch.randint(16, (out_features, in_features)).to(torch.uint8)
    values = torch.randn(16).bfloat16().float()
    return QuantizedWeight(codes, torch.rand(out_features, in_features // 64), None, 64, 4, table=values)


WEIGHTS = {
    "4 bits": lambda: integers(130, 512, 32, 4),
    "4 bits, symmetric": lambda: symmetric(integers(40, 256, 128, 4)),
    "4 bits, a scale a row": lambda: integers(47, 96, 96, 4),
    "4 bits, biased": lambda: integers(70, 64, 32, 4, bias=torch.randn(70).bfloat16()),
    "4 bits, in another order": lambda: integers(40, 256, 64, 4, order=torch.randperm(256)),
    "8 bits": lambda: integers(130, 512, 128, 8),
    "8 bits, symmetric": lambda: symmetric(integers(24, 1024, 1024, 8)),
    "int8": lambda: signed(100, 416),
    "fp8": lambda: floats(64, 256),
    "a table": lambda: table(48, 192),
}


def close(got: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight, packed: cpu.PackedWeight) -> bool:
    values = weight.dequantized()
    if type(packed) is not PackedCodes:  # processors without byte look-ups: dequantized at load to the model's dtype
        values = values.to(BFLOAT16)
    want = x.double() @ values.double().T + (0 if weight.bias is None else weight.bias.double())
    # rounded once to bfloat16; sums are in float32
    return bool(((got.double() - want).abs() <= want.abs() * 2**-8 + 2e-5 * want.abs().max()).all())


@pytest.mark.parametrize("name", WEIGHTS)
def test_equals_product_with_dequantized_weight(name):
    weight = WEIGHTS[name]()
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    for rows in ROWS:
        x = torch.randn(rows, weight.codes.size(1)).to(BFLOAT16)
        assert close(cpu.quantized_linear(x, packed), x, weight, packed), rows


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_row_has_the_same_bits_in_any_batch(name):
    weight = WEIGHTS[name]()
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    x = torch.randn(300, weight.codes.size(1)).to(BFLOAT16)
    whole = cpu.quantized_linear(x, packed)
    for rows in (*ROWS, 255):
        for first in (0, 1, 300 - rows):
            assert torch.equal(cpu.quantized_linear(x[first : first + rows], packed), whole[first : first + rows]), rows


BY_TOKEN = QuantizedActivations(torch.int8)
STATIC = QuantizedActivations(torch.int8, scale=torch.tensor([0.02]))
MET_BY_INTEGERS = {
    "a scale a token": lambda: replace(signed(100, 416), activations=BY_TOKEN),
    "one of all tokens": lambda: replace(signed(64, 1024), activations=STATIC),
    "several panels": lambda: replace(signed(300, 96), activations=BY_TOKEN),
    "biased": lambda: replace(signed(130, 320), activations=BY_TOKEN, bias=torch.randn(130).bfloat16()),
}


@pytest.mark.parametrize("name", MET_BY_INTEGERS)
def test_activations_are_quantized_to_integers(name):
    weight = MET_BY_INTEGERS[name]()
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    if type(packed) is not PackedEightBits:
        pytest.skip("this processor does not multiply integers of 8 bits: activations stay as they are")
    for rows in ROWS:
        x = torch.randn(rows, weight.codes.size(1)).to(BFLOAT16)
        x[rows // 2] *= 40  # gets its own scale
        x[rows // 3] = 0
        assert_close(cpu.quantized_linear(x, packed), reference(x, weight), units=2)


@pytest.mark.parametrize("name", MET_BY_INTEGERS)
def test_quantized_row_has_the_same_bits_in_any_batch(name):
    weight = MET_BY_INTEGERS[name]()
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    x = torch.randn(300, weight.codes.size(1)).to(BFLOAT16)
    whole = cpu.quantized_linear(x, packed)
    for rows in (*ROWS, 255):
        for first in (0, 1, 300 - rows):
            assert torch.equal(cpu.quantized_linear(x[first : first + rows], packed), whole[first : first + rows]), rows


def test_the_largest_codes_of_the_longest_rows_do_not_overflow():
    codes = torch.full((17, 2**17), -128, dtype=torch.int8)
    weight = QuantizedWeight(codes, torch.ones(17, 1), None, 2**17, 8, activations=BY_TOKEN)
    x = torch.ones(2, 2**17).to(BFLOAT16)
    want = torch.full((2, 17), -128.0 * 2**17).to(BFLOAT16)
    assert torch.equal(cpu.quantized_linear(x, cpu.prepare_quantized_linear(weight, BFLOAT16)), want)


def test_nan_stays_in_its_row():
    weight = MET_BY_INTEGERS["a scale a token"]()
    x = torch.randn(3, 416).to(BFLOAT16)
    x[1, 7] = torch.nan
    out = cpu.quantized_linear(x, cpu.prepare_quantized_linear(weight, BFLOAT16))
    assert out.isnan().any(1).tolist() == [False, True, False]
    assert out[1].isnan().all()


def groups(weight: QuantizedWeight) -> QuantizedWeight:
    return replace(weight, scales=weight.scales.expand(-1, 13).contiguous(), group_size=32)


@pytest.mark.parametrize(
    "other",
    [
        groups,
        lambda weight: replace(weight, zeros=torch.ones(100, 1)),
        lambda weight: replace(weight, order=torch.arange(416)),
    ],
    ids=["groups", "zero points", "an order"],
)
def test_activations_of_other_weights_are_not_quantized(other):
    weight = other(MET_BY_INTEGERS["a scale a token"]())
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    x = torch.randn(5, 416).to(BFLOAT16)
    assert type(packed) is not PackedEightBits
    assert close(cpu.quantized_linear(x, packed), x, weight, packed)


@pytest.mark.parametrize("activations", [None, BY_TOKEN], ids=["codes", "integers"])
def test_is_recorded_on_a_tape(activations):
    weight = integers(64, 128, 32, 4, order=torch.randperm(128))
    if activations is not None:
        weight = replace(signed(64, 128), activations=activations)
    packed = cpu.prepare_quantized_linear(weight, BFLOAT16)
    if type(packed) not in (PackedCodes, PackedEightBits):
        pytest.skip("this processor has no look-ups of bytes: weights are widened at load")
    x, tape = torch.randn(9, 128).to(BFLOAT16), Tape(num_tokens=9)
    with tape.recording():
        out = cpu.quantized_linear(x, packed)
    tape.replay(num_tokens=5)
    assert torch.equal(out[:5], cpu.quantized_linear(x[:5], packed))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_use_dequantized_weights(dtype):
    weight = integers(40, 64, 32, 4)
    x = torch.randn(3, 64).to(dtype)
    assert torch.allclose(
        cpu.quantized_linear(x, cpu.prepare_quantized_linear(weight, dtype)).float(),
        x.float() @ weight.dequantized().T,
        rtol=5e-3,
        atol=5e-2 if dtype is torch.float16 else 1e-4,
    )
