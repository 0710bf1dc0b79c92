"""Products with quantized weights: kernels/reference/quantized_linear.py.

For x in bfloat16, on processors that can look codes up in registers (codes.h), codes stay packed and x stays as it is.
8-bit integers are multiplied with quantized activations if the weight requests it, its scales are per row, and the
processor supports it (integer_linear.cpp). Otherwise weights are dequantized once, at load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from quire.kernels.cpu.functions import ALIGNMENT, PackedWeight, linear, prepare_linear
from quire.kernels.cpu.native import LIBRARY, calls, prefer_huge_pages
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.reference.quantized_linear import QuantizedWeight

Tensor = torch.Tensor
WIDTH = 32  # columns; groups are multiples of it
FP8 = torch.float8_e4m3fn
PANEL = 8  # interleaved blocks of columns (quantized_linear.cpp)
LONGEST = 2**17  # columns; integer products accumulate in 32 bits
HALF = 0.5  # offset of 8-bit integer magnitudes


@dataclass(frozen=True, slots=True)
class PackedCodes:
    """Weight with codes looked up in a table; the arguments of the call are precomputed."""

    bits: int
    in_features: int
    out_features: int
    group_size: int
    zero: float  # common zero point, without per-group ones
    pointers: tuple[int | None, ...]  # codes, scales, zeros, table, bias
    order: int | None
    owners: tuple[Tensor | None, ...]  # keep the memory of the pointers alive


@dataclass(frozen=True, slots=True)
class PackedEightBits:
    """8-bit weight multiplied with 8-bit activations; the arguments of the call are precomputed."""

    in_features: int
    out_features: int
    pointers: tuple[int | None, ...]  # scale of all activations, codes, scales, bias
    owners: tuple[Tensor | None, ...]


Packed = PackedCodes | PackedEightBits | PackedWeight | LinearWeight


def prepare_quantized_linear(weight: QuantizedWeight, dtype: torch.dtype) -> Packed:
    """Packs a quantized weight for products with x in `dtype`: as 8-bit integers, as packed codes, or dequantized where
    the processor, dtype or group size permits neither."""
    if _meets_integers(weight, dtype):
        return _prepare_integers(weight)
    lanes = LIBRARY.quire_has_codes()
    whole = weight.codes.size(1) % WIDTH == 0 and (weight.group_size % WIDTH == 0 or weight.scales.size(1) == 1)
    bias_fits = weight.bias is None or weight.bias.dtype is dtype
    if not lanes or dtype is not torch.bfloat16 or weight.bits not in (4, 8) or not whole or not bias_fits:
        return prepare_linear(weight.dequantized().to(dtype), weight.bias)
    out_features, in_features = weight.codes.shape
    group_size = in_features if weight.scales.size(1) == 1 else weight.group_size
    if in_features % group_size:
        return prepare_linear(weight.dequantized().to(dtype), weight.bias)
    codes, zeros, zero, table = _by_table(weight)
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -out_features % lanes))
    pack = _nibbles if weight.bits == 4 else _bytes
    scales, zeros = _by_block(weight.scales.float(), lanes), None if zeros is None else _by_block(zeros, lanes)
    order = None if weight.order is None else weight.order.int()
    bias = None if weight.bias is None else weight.bias.contiguous()
    tensors = (_aligned(_in_panels(pack(padded, lanes))), scales, zeros, table, bias)
    pointers = _pointers(tensors)
    place = None if order is None else order.data_ptr()
    return PackedCodes(weight.bits, in_features, out_features, group_size, zero, pointers, place, (*tensors, order))


def _meets_integers(weight: QuantizedWeight, dtype: torch.dtype) -> bool:
    """Returns whether the weight and processor support the product of 8-bit integers with quantized activations."""
    wanted, columns = weight.activations, weight.codes.size(1)
    return (
        wanted is not None
        and LIBRARY.quire_has_integers() > 0
        and dtype is torch.bfloat16
        and wanted.dtype is weight.codes.dtype is torch.int8
        and wanted.group_size in (0, columns)
        and weight.scales.size(1) == 1
        and weight.zeros is None
        and weight.order is None
        and columns % WIDTH == 0
        and columns <= LONGEST
        and (weight.bias is None or weight.bias.dtype is dtype)
    )


def _prepare_integers(weight: QuantizedWeight) -> PackedEightBits:
    """Packs 8-bit codes, shifted to unsigned, in blocks of 64 bytes for the integer product, with float32 scales per
    row."""
    assert weight.activations is not None
    lanes = LIBRARY.quire_has_integers()
    out_features, in_features = weight.codes.shape
    padded = torch.nn.functional.pad(weight.codes.view(torch.uint8) ^ 0x80, (0, 0, 0, -out_features % lanes))
    fours = padded.view(-1, lanes, in_features // 4, 4).transpose(1, 2).flatten(2)  # [blocks, units, 64]
    scales = torch.nn.functional.pad(weight.scales.float().flatten(), (0, -out_features % lanes))
    given = None if weight.activations.scale is None else weight.activations.scale.float().contiguous()
    bias = None if weight.bias is None else weight.bias.contiguous()
    tensors = (given, _aligned(_in_panels(fours)), scales, bias)
    return PackedEightBits(in_features, out_features, _pointers(tensors), tensors)


def _pointers(tensors: tuple[Tensor | None, ...]) -> tuple[int | None, ...]:
    return tuple(None if tensor is None else tensor.data_ptr() for tensor in tensors)


def _by_table(weight: QuantizedWeight) -> tuple[Tensor, Tensor | None, float, Tensor]:
    """Returns uint8 codes, zero points (float32 per group, else one for all) and the table of bfloat16 values."""
    codes, zeros = weight.codes, None if weight.zeros is None else weight.zeros.float()
    if weight.bits == 4 and weight.table is not None:
        return codes, zeros, 0.0, weight.table.bfloat16()
    if weight.bits == 4:
        moved, table = -8.0, torch.arange(-8.0, 8.0)
    elif codes.dtype is FP8:
        return codes.view(torch.uint8), zeros, 0.0, torch.arange(128, dtype=torch.uint8).view(FP8).bfloat16()
    else:
        moved, table = HALF, torch.arange(128) + HALF
        if codes.dtype is torch.uint8:  # signed codes above 127 are negative
            codes, moved = (codes ^ 0x80).view(torch.int8), HALF - 128
        codes = torch.where(codes < 0, codes ^ 0x7F, codes).view(torch.uint8)
    if zeros is None:
        return codes, None, moved, table.bfloat16()
    zeros = zeros + moved
    return codes, zeros if zeros.any() else None, 0.0, table.bfloat16()


def _nibbles(codes: Tensor, lanes: int) -> Tensor:
    """Interleaves [out_features, in_features] to [blocks, units, 64]: lanes of pairs of 16-bit words, four steps in
    each."""
    pairs = codes.view(codes.size(0) // lanes, lanes, -1, 4, 2).permute(0, 2, 1, 4, 3).int()
    words = pairs[..., 0] | pairs[..., 1] << 4 | pairs[..., 2] << 8 | pairs[..., 3] << 12
    return words.to(torch.int16).contiguous().view(torch.uint8).view(*words.shape[:2], -1)


def _bytes(codes: Tensor, lanes: int) -> Tensor:
    """Interleaves [out_features, in_features] to [blocks, units, 64]: quarters of 2 steps of their columns' pairs."""
    pairs = codes.view(codes.size(0) // lanes, 4, lanes // 4, -1, 2, 2)
    return pairs.permute(0, 3, 1, 4, 2, 5).flatten(2)


def _by_block(values: Tensor, lanes: int) -> Tensor:
    """Interleaves [out_features, groups] to [panels, groups, blocks of the panel, lanes], flat."""
    padded = torch.nn.functional.pad(values, (0, 0, 0, -values.size(0) % lanes))
    return _in_panels(padded.view(-1, lanes, values.size(1)).transpose(1, 2))


def _in_panels(blocks: Tensor) -> Tensor:
    """Interleaves [blocks, n, m] to [panels, n, blocks of the panel, m], flat; the last panel may have fewer blocks."""
    return torch.cat([panel.transpose(0, 1).flatten() for panel in blocks.split(PANEL)])


def _aligned(packed: Tensor) -> Tensor:
    """Copies packed bytes to new memory aligned to ALIGNMENT, in huge pages if possible."""
    memory = torch.empty(packed.numel() + ALIGNMENT, dtype=torch.uint8)
    place = memory[-memory.data_ptr() % ALIGNMENT :][: packed.numel()]
    prefer_huge_pages(place).copy_(packed.flatten())
    return place


def quantized_linear(x: Tensor, weight: Packed) -> Tensor:
    """Computes x @ weight.T + bias: dense [num_tokens, in_features] -> [num_tokens, out_features]; packed codes and
    integers need x in bfloat16."""
    if type(weight) is PackedEightBits:
        return _integer_linear(x, weight)
    if type(weight) is not PackedCodes:
        return linear(x, weight)
    rows, out = x.size(0), _result(x, weight)
    calls.quantized_linear(
        weight.bits,
        rows,
        weight.in_features,
        weight.out_features,
        weight.group_size,
        weight.zero,
        x.data_ptr(),
        weight.order,
        *weight.pointers,
        out.data_ptr(),
    )
    return out


def _integer_linear(x: Tensor, weight: PackedEightBits) -> Tensor:
    """Quantizes x in bfloat16 and multiplies in 8-bit integers -> bfloat16 [num_tokens, out_features]."""
    rows, out = x.size(0), _result(x, weight)
    calls.integer_linear(rows, weight.in_features, weight.out_features, x.data_ptr(), *weight.pointers, out.data_ptr())
    return out


def _result(x: Tensor, weight: PackedCodes | PackedEightBits) -> Tensor:
    """Checks x against the weight and returns an uninitialized result [num_tokens, out_features]."""
    assert x.dtype is torch.bfloat16
    assert x.size(1) == weight.in_features
    assert x.is_contiguous()
    return calls.empty(x.size(0), weight.out_features, dtype=x.dtype)
