"""Products with quantized weights: kernels/reference/quantized_linear.py. Activations stay in x's dtype.

Codes are kept as they are for x in bfloat16, on processors that can look them up in registers (codes.h); elsewhere they
are widened once, when the weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.cpu.functions import ALIGNMENT, PackedWeight, linear, prepare_linear
from kernels.cpu.native import LIBRARY, calls, prefer_huge_pages
from kernels.reference.linear import LinearWeight
from kernels.reference.quantized_linear import QuantizedWeight

Tensor = torch.Tensor
WIDTH = 32  # columns: groups are whole multiples
FP8 = torch.float8_e4m3fn
HALF = 0.5  # by which the magnitudes of integers of 8 bits are too large


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """The numbers stand ready for the call."""

    bits: int
    in_features: int
    out_features: int
    group_size: int
    zero: float  # of all groups, where they have none of their own
    pointers: tuple[int | None, ...]  # codes, scales, zeros, table, bias
    order: int | None
    owners: tuple[Tensor | None, ...]  # keep the memory behind the pointers


Packed = PackedCodes | PackedWeight | LinearWeight


def prepare_quantized_linear(weight: QuantizedWeight, dtype: torch.dtype) -> Packed:
    lanes = LIBRARY.quire_has_codes()
    whole = weight.codes.size(1) % WIDTH == 0 and (weight.group_size % WIDTH == 0 or weight.scales.size(1) == 1)
    bias_fits = weight.bias is None or weight.bias.dtype is dtype
    if not lanes or dtype is not torch.bfloat16 or weight.bits not in (4, 8) or not whole or not bias_fits:
        return prepare_linear(weight.widened().to(dtype), weight.bias)
    out_features, in_features = weight.codes.shape
    group_size = in_features if weight.scales.size(1) == 1 else weight.group_size
    if in_features % group_size:
        return prepare_linear(weight.widened().to(dtype), weight.bias)
    codes, zeros, zero, table = _by_table(weight)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -out_features % lanes))
    pack = _nibbles if weight.bits == 4 else _bytes
    scales, zeros = _by_block(weight.scales.float(), lanes), None if zeros is None else _by_block(zeros, lanes)
    order = None if weight.order is None else weight.order.int()
    bias = None if weight.bias is None else weight.bias.contiguous()
    tensors = (_aligned(pack(padded, lanes)), scales, zeros, table, bias)
    pointers = tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)
    place = None if order is None else order.data_ptr()
    return PackedCodes(weight.bits, in_features, out_features, group_size, zero, pointers, place, (*tensors, order))


def _by_table(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, float, Tensor]:
    """uint8 codes; what is subtracted, float32 zeros of groups or else one of all; the bfloat16 values that codes are
    looked up in."""
    codes, zeros = weight.codes, None if weight.zeros is None else weight.zeros.float()
    if weight.bits == 4 and weight.table is not None:
        return codes, zeros, 0.0, weight.table.bfloat16()
    if weight.bits == 4:
        moved, table = -8.0, torch.arange(-8.0, 8.0)
    elif codes.dtype is FP8:
        return codes.view(torch.uint8), zeros, 0.0, torch.arange(128, dtype=torch.uint8).view(FP8).bfloat16()
    else:
        moved, table = HALF, torch.arange(128) + HALF
        if codes.dtype is torch.uint8:  # what is above 127 is negative where there is a sign
            codes, moved = (codes ^ 0x80).view(torch.int8), HALF - 128
        codes = torch.where(codes < 0, codes ^ 0x7F, codes).view(torch.uint8)
    if zeros is None:
        return codes, None, moved, table.bfloat16()
    zeros = zeros + moved
    return codes, zeros if zeros.any() else None, 0.0, table.bfloat16()


def _nibbles(codes: Tensor, lanes: int) -> Tensor:
    """[out_features, in_features] -> [blocks, units, lanes, 2] words of 16 bits: four steps of a pair each"""
    pairs = codes.view(codes.size(0) // lanes, lanes, -1, 4, 2).permute(0, 2, 1, 4, 3).int()
    words = pairs[..., 0] | pairs[..., 1] << 4 | pairs[..., 2] << 8 | pairs[..., 3] << 12
    return words.to(torch.int16).contiguous().view(torch.uint8)


def _bytes(codes: Tensor, lanes: int) -> Tensor:
    """[out_features, in_features] -> [blocks, units, quarters, 2 steps, columns of a quarter, 2]"""
    pairs = codes.view(codes.size(0) // lanes, 4, lanes // 4, -1, 2, 2)
    return pairs.permute(0, 3, 1, 4, 2, 5).contiguous()


def _by_block(values: Tensor, lanes: int) -> Tensor:
    """[out_features, groups] -> [blocks, groups, lanes]"""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -values.size(0) % lanes))
    return padded.view(-1, lanes, values.size(1)).transpose(1, 2).contiguous()


def _aligned(packed: Tensor) -> Tensor:
    memory = torch.empty(packed.numel() + ALIGNMENT, dtype=torch.uint8)
    place = memory[-memory.data_ptr() % ALIGNMENT :][: packed.numel()]
    prefer_huge_pages(place).copy_(packed.flatten())
    return place


def quantized_linear(x: Tensor, weight: Packed) -> Tensor:
    if type(weight) is not PackedCodes:
        return linear(x, weight)
    rows, in_features = x.shape
    assert x.dtype is torch.bfloat16
    assert in_features == weight.in_features
    assert x.is_contiguous()
    out = calls.empty(rows, weight.out_features, dtype=x.dtype)
    calls.quantized_linear(
        weight.bits,
        rows,
        in_features,
        weight.out_features,
        weight.group_size,
        weight.zero,
        x.data_ptr(),
        weight.order,
        *weight.pointers,
        out.data_ptr(),
    )
    return out
