"""Quantizes floating-point weights to 8-bit floats (float8_e4m3fn) at load."""

from __future__ import annotations

import torch

from quire.kernels.reference.attention.kv_dtype import FP8, FP8_MAX
from quire.kernels.reference.quantized_linear import LEAST_SCALE, QuantizedActivations, QuantizedWeight

BLOCK = 128  # side of a weight block, and elements of a token per activation scale


def quantize_to_fp8(weight: torch.Tensor, bias: torch.Tensor | None, *, blocks: bool) -> QuantizedWeight:
    """Quantizes `weight` [out_features, in_features] to float8_e4m3fn with a scale per row; activations are to be
    quantized with one per token. `blocks`: a scale per BLOCK x BLOCK block instead, and per BLOCK elements of a
    token."""
    rows, columns = weight.shape
    if not blocks:
        scales = _scales(weight.abs().amax(1, keepdim=True))
        codes = _codes(weight.float() / scales)
        return QuantizedWeight(codes, scales, None, columns, 8, activations=QuantizedActivations(FP8), bias=bias)
    padded = torch.nn.functional.pad(weight, (0, -columns % BLOCK, 0, -rows % BLOCK))
    tiles = padded.view(-(-rows // BLOCK), BLOCK, -(-columns // BLOCK), BLOCK)
    scales = _scales(tiles.abs().amax(dim=(1, 3)))
    codes = _codes(tiles.float() / scales[:, None, :, None]).view(padded.shape)[:rows, :columns].contiguous()
    by_row = scales.repeat_interleave(BLOCK, 0)[:rows]
    return QuantizedWeight(codes, by_row, None, BLOCK, 8, activations=QuantizedActivations(FP8, BLOCK), bias=bias)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """Returns float32 scales by which the magnitudes `largest` become the largest 8-bit float."""
    return (largest.float() / FP8_MAX).clamp(min=LEAST_SCALE)


def _codes(values: torch.Tensor) -> torch.Tensor:
    """Clamps and casts to codes: a division may slightly exceed the maximum, which the cast would turn into NaN."""
    return values.clamp(-FP8_MAX, FP8_MAX).to(FP8)
