"""Quantized weights for tests."""

from __future__ import annotations

from dataclasses import replace

import torch

from quire.kernels.reference.quantized_linear import QuantizedWeight


def integers(
    out_features: int, in_features: int, group: int, bits: int, *, zeros: bool = True, **more: object
) -> QuantizedWeight:
    codes = torch.randint(2**bits, (out_features, in_features)).to(torch.uint8)
    groups = in_features // group
    scales = torch.rand(out_features, groups) / 2**bits + 0.01
    subtracted = torch.randint(2**bits, (out_features, groups)).float() if zeros else None
    return QuantizedWeight(codes, scales, subtracted, group_size=group, bits=bits, **more)


def on(device: torch.device, weight: QuantizedWeight) -> QuantizedWeight:
    moved = {name: value.to(device) for name, value in vars(weight).items() if isinstance(value, torch.Tensor)}
    activations = weight.activations
    if activations is not None and activations.scale is not None:
        moved["activations"] = replace(activations, scale=activations.scale.to(device))
    return replace(weight, **moved)
