"""Matrix products with weights of 8-bit floats (float8_e4m3fn), and what they multiply quantized as it comes.

A weight has one scale for all of it, or one for every block of 128 x 128; a token's activations have one for every 128,
found when they are there. Products add up in float32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.reference.kv_dtype import FP8, FP8_MAX

GROUP = 128  # elements of a token that share a scale, and the side of a weight's block
LEAST_SCALE = 1e-12  # of nothing but zeros


@dataclass(frozen=True)
class Fp8Weight:
    """weight * scales, block by block."""

    weight: torch.Tensor  # float8_e4m3fn [out_features, in_features]
    scales: torch.Tensor  # float32 [blocks of out_features, blocks of in_features], or [1, 1]
    bias: torch.Tensor | None  # [out_features]

    @property
    def is_blocked(self) -> bool:
        return self.scales.numel() > 1

    def widened(self) -> torch.Tensor:
        """float32 [out_features, in_features]"""
        wide = self.weight.float()
        if not self.is_blocked:
            return wide * self.scales
        scales = self.scales.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
        return wide * scales[: wide.size(0), : wide.size(1)]


def prepare_fp8_linear(weight: torch.Tensor, bias: torch.Tensor | None, *, blocks: bool) -> Fp8Weight:
    """Quantizes `weight` [out_features, in_features]: a scale for every block, or (not `blocks`) for all of it."""
    wide = weight.float()
    if not blocks:
        scale = (wide.abs().amax() / FP8_MAX).clamp(min=LEAST_SCALE).view(1, 1)
        return Fp8Weight((wide / scale).to(FP8), scale, bias)
    rows, columns = wide.shape
    padded = torch.nn.functional.pad(wide, (0, -columns % GROUP, 0, -rows % GROUP))
    tiles = padded.view(-(-rows // GROUP), GROUP, -(-columns // GROUP), GROUP)
    scales = (tiles.abs().amax(dim=(1, 3)) / FP8_MAX).clamp(min=LEAST_SCALE)
    quantized = (tiles / scales[:, None, :, None]).view(padded.shape)[:rows, :columns]
    return Fp8Weight(quantized.to(FP8).contiguous(), scales, bias)


def quantize_tokens(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, in_features] -> float8_e4m3fn of that shape, float32 scales [num_tokens, groups]."""
    tokens, size = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -size % GROUP)).view(tokens, -1, GROUP)
    scales = (groups.abs().amax(2) / FP8_MAX).clamp(min=LEAST_SCALE)
    quantized = (groups / scales.unsqueeze(2)).view(tokens, -1)[:, :size]
    return quantized.to(FP8).contiguous(), scales


def fp8_linear(x: torch.Tensor, weight: Fp8Weight) -> torch.Tensor:
    """x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features], in x's dtype."""
    quantized, scales = quantize_tokens(x)
    wide = quantized.float() * scales.repeat_interleave(GROUP, 1)[:, : x.size(1)]
    out = wide @ weight.widened().T
    return (out if weight.bias is None else out + weight.bias.float()).to(x.dtype)
