"""Matrix products with quantized weights: codes with scales and zero points.

A value is (code - zero) * scale, with zero and scale per group of a row's columns. Codes are integers of 4 or 8 bits,
8-bit floats, or indices into a table of 16 values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.kernels.reference.attention.kv_dtype import FP8_MAX

WIDE = 32  # bits of float32 codes
LEAST_SCALE = 1e-12  # scale of all-zero groups
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: FP8_MAX}


@dataclass(frozen=True)
class QuantizedActivations:
    """Quantization of x before the product, on devices that multiply 8 bits; ignored elsewhere."""

    dtype: torch.dtype  # int8 or float8_e4m3fn
    group_size: int = 0  # elements of a token per scale; 0: all
    scale: torch.Tensor | None = None  # float32 [1], static scale; None: dynamic, per token


@dataclass(frozen=True)
class QuantizedWeight:
    """Quantized weight: (codes - zeros) * scales, by group."""

    codes: torch.Tensor  # [out_features, in_features] int8, uint8, float8_e4m3fn, float32; 4-bit codes take a byte each
    scales: torch.Tensor  # float32 [out_features, groups]
    zeros: torch.Tensor | None  # of the same shape as scales
    group_size: int  # columns per group; the last group may have fewer
    bits: int  # 4, 8, or WIDE; 4: codes are below 16
    table: torch.Tensor | None = None  # float32 [16]: values of the codes; None: the codes themselves
    order: torch.Tensor | None = None  # int64 [in_features]: element of x for each column
    activations: QuantizedActivations | None = None
    bias: torch.Tensor | None = None  # [out_features]

    def dequantized(self) -> torch.Tensor:
        """Returns float32 [out_features, in_features], columns in the order of x."""
        values = self.codes.float() if self.table is None else self.table[self.codes.long()]
        if self.zeros is not None:
            values -= self._by_column(self.zeros)
        values *= self._by_column(self.scales)
        return values if self.order is None else values[:, self.order.argsort()]

    def _by_column(self, groups: torch.Tensor) -> torch.Tensor:
        """Expands values per group [out_features, groups] to columns; one group per row stays and broadcasts."""
        if groups.size(1) == 1:
            return groups
        return groups.repeat_interleave(self.group_size, 1)[:, : self.codes.size(1)]

    def select_rows(self, rows: torch.Tensor) -> QuantizedWeight:
        """Returns the weight of these rows of the output, with their bias."""
        zeros = None if self.zeros is None else self.zeros[rows]
        bias = None if self.bias is None else self.bias[rows]
        return replace(self, codes=self.codes[rows], scales=self.scales[rows], zeros=zeros, bias=bias)

    def select_columns(self, begin: int, end: int) -> QuantizedWeight:
        """Returns the weight of columns [begin, end), which must be whole groups; only for columns in x's order."""
        assert self.order is None, "a row's groups lie anywhere in x"
        if self.scales.size(1) == 1:
            return replace(self, codes=self.codes[:, begin:end], group_size=end - begin)
        assert begin % self.group_size == 0, (begin, self.group_size)
        groups = slice(begin // self.group_size, -(-end // self.group_size))
        zeros = None if self.zeros is None else self.zeros[:, groups]
        return replace(self, codes=self.codes[:, begin:end], scales=self.scales[:, groups], zeros=zeros)

    def times(self, factors: torch.Tensor, of_bias: torch.Tensor) -> QuantizedWeight:
        """Scales each row by `factors`, float32 [out_features]."""
        bias = None if self.bias is None else (self.bias * of_bias).to(self.bias.dtype)
        return replace(self, scales=self.scales * factors.unsqueeze(1), bias=bias)


def side_by_side(weights: Sequence[QuantizedWeight], bias: torch.Tensor | None) -> QuantizedWeight:
    """Concatenates the rows of weights that are quantized in the same way, with one `bias` for all rows. Weights with
    different orders or tables are dequantized."""
    first = weights[0]
    if len(weights) == 1:
        return replace(first, bias=bias)
    if any(not _same(weight.order, first.order) or not _same(weight.table, first.table) for weight in weights):
        return _as_values(weights, bias)
    activations = first.activations
    if activations is not None and activations.scale is not None:
        scale = torch.stack([w.activations.scale for w in weights]).amax(0)  # type: ignore[union-attr]
        activations = replace(activations, scale=scale)
    codes = torch.cat([weight.codes for weight in weights])
    zeros = None if first.zeros is None else torch.cat([weight.zeros for weight in weights])  # type: ignore[misc]
    scales = torch.cat([weight.scales for weight in weights])
    return replace(first, codes=codes, scales=scales, zeros=zeros, activations=activations, bias=bias)


def _as_values(weights: Sequence[QuantizedWeight], bias: torch.Tensor | None) -> QuantizedWeight:
    """Dequantizes parts with different column orders, which have no common codes."""
    values = torch.cat([weight.dequantized() for weight in weights])
    return QuantizedWeight(values, values.new_ones(len(values), 1), None, values.size(1), bits=WIDE, bias=bias)


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other or (one is not None and other is not None and torch.equal(one, other))


def prepare_quantized_linear(weight: QuantizedWeight, dtype: torch.dtype) -> QuantizedWeight:
    """Packs the weight for x of `dtype`, once, when the model is loaded. May keep the given tensors."""
    return weight


def quantize_activations(x: torch.Tensor, wanted: QuantizedActivations) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantizes x [num_tokens, in_features] to codes of that shape and float32 scales [num_tokens, groups]: per token
    and group from the largest magnitude, or `wanted.scale` for all. Larger values are clamped."""
    tokens, size = x.shape
    group = wanted.group_size or size
    groups = torch.nn.functional.pad(x.float(), (0, -size % group)).view(tokens, -1, group)
    largest = LARGEST[wanted.dtype]
    if wanted.scale is None:
        scales = (groups.abs().amax(2) / largest).clamp(min=LEAST_SCALE)
    else:
        scales = wanted.scale.float().view(1, 1).expand(tokens, groups.size(1))
    codes = (groups / scales.unsqueeze(2)).clamp(-largest, largest).view(tokens, -1)[:, :size]
    return (codes.round() if wanted.dtype is torch.int8 else codes).to(wanted.dtype).contiguous(), scales


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    """Computes x @ weight.T + bias in float32: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype.
    Quantizes x first if the weight requests it."""
    wide = x.float()
    if weight.activations is not None:
        codes, scales = quantize_activations(x, weight.activations)
        group = weight.activations.group_size or x.size(1)
        wide = codes.float() * scales.repeat_interleave(group, 1)[:, : x.size(1)]
    out = wide @ weight.dequantized().T
    return (out if weight.bias is None else out + weight.bias.float()).to(x.dtype)
