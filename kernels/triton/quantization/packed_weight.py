"""4-bit and 8-bit weights in the layout for products with 16-bit activations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton

from quire.kernels.reference.quantized_linear import QuantizedWeight
from quire.kernels.triton.precompile.shapes import ModelShape

SPANS = (
    128,
    64,
    32,
)  # columns stored together: the first half of 4-bit codes in the low nibbles
# With this exponent, a 4-bit code in the lowest mantissa bits is added exactly.
OFFSETS = {torch.float16: 1024.0, torch.bfloat16: 128.0}


@dataclass(frozen=True)
class PackedWeight:
    """Quantized weight in the layout of the kernels."""

    codes: torch.Tensor  # [out_features, in_features]; 4-bit codes two per byte: [out_features, in_features / 2]
    scales: torch.Tensor  # float32 [groups, out_features]
    zeros: torch.Tensor | None  # of the same shape as scales
    zero: float  # common zero point if there are no zeros
    group_size: int
    bits: int
    span: int
    table: torch.Tensor | None  # float32 [16]
    order: torch.Tensor | None  # int32 [in_features]
    bias: torch.Tensor | None

    @property
    def in_features(self) -> int:
        return self.codes.size(1) * 8 // self.bits


def packed_takes(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Returns whether the kernels can read the weight packed: 4 or 8 bits, activations of 16, groups that are powers of
    two or whole rows, integer zero points."""
    in_features = weight.codes.size(1)
    whole = weight.group_size >= SPANS[-1] and weight.group_size & (weight.group_size - 1) == 0
    return (
        dtype in OFFSETS
        and weight.bits in (4, 8)
        and in_features % SPANS[-1] == 0
        and (whole or weight.scales.size(1) == 1)
        and (weight.zeros is None or bool((weight.zeros == weight.zeros.round()).all()))  # subtracted in 16 bits
    )


def span_of(in_features: int, group_size: int) -> int:
    """Returns the longest span of columns, with two halves interleaved in bytes, that divides rows and groups."""
    return next(span for span in SPANS if in_features % span == 0 and group_size % span == 0)


def pack(weight: QuantizedWeight) -> PackedWeight:
    """Packs the weight: 4-bit codes two per byte, half a span apart, and float32 scales and zeros [groups,
    out_features]; equal zero points become one constant."""
    out_features, in_features = weight.codes.shape
    group = in_features if weight.scales.size(1) == 1 else weight.group_size
    span = span_of(in_features, group)
    codes = weight.codes
    if weight.bits == 4:
        low, high = codes.view(out_features, -1, 2, span // 2).unbind(2)
        codes = (low | high << 4).flatten(1)
    zeros = None if weight.zeros is None else weight.zeros.float().t().contiguous()
    alike = zeros is not None and bool((zeros == zeros[0, 0]).all())
    return PackedWeight(
        codes.contiguous(),
        weight.scales.float().t().contiguous(),
        None if alike else zeros,
        float(zeros[0, 0]) if alike else 0.0,  # compile-time constant: the same for all layers
        group,
        weight.bits,
        span,
        weight.table,
        None if weight.order is None else weight.order.int(),
        weight.bias,
    )


def how_codes_are_read(weight: PackedWeight, dtype: torch.dtype) -> dict[str, object]:
    """Returns the compile-time constants by which kernels dequantize the weight's codes to `dtype`."""
    has_offset = weight.bits == 4 and weight.table is None
    return {
        "GROUP": weight.group_size,
        "SPAN": weight.span,
        "ZERO": weight.zero,
        "OFFSET": OFFSETS[dtype] if has_offset else 0.0,
        "PAIRED": not triton.knobs.runtime.interpret,
    }


def as_stored(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """Reorders x's columns to the order of the codes."""
    return x if weight.order is None else x.index_select(1, weight.order)


def projections(shape: ModelShape) -> Iterator[tuple[int, int, bool, bool]]:
    """Yields in_features, out_features, is_gated and adds_to_residual of a layer's products."""
    if not shape.experts:
        yield shape.hidden_size, 2 * shape.intermediate_size, True, False
        yield shape.intermediate_size, shape.hidden_size, False, True
    yield shape.hidden_size, shape.qkv_size, False, False
    yield shape.q_size, shape.hidden_size, False, True


def empty_weight(shape: ModelShape, in_features: int, out_features: int) -> PackedWeight:
    """Creates a 4-bit weight without memory."""
    assert shape.packed is not None
    group, zero = shape.packed.group_size or in_features, shape.packed.zero
    scales = shape.empty(in_features // group, out_features, dtype=torch.float32)
    codes = shape.empty(out_features, in_features // 2, dtype=torch.uint8)
    span, zeros = span_of(in_features, group), scales if zero is None else None
    return PackedWeight(codes, scales, zeros, zero or 0.0, group, 4, span, None, None, None)
