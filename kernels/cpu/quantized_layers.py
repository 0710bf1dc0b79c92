"""Products with quantized weights: kernels/reference/quantized_linear.py. Activations stay in x's dtype."""

from __future__ import annotations

import torch

from kernels.cpu.functions import PackedWeight, linear, prepare_linear
from kernels.reference.linear import LinearWeight
from kernels.reference.quantized_linear import QuantizedWeight


def prepare_quantized_linear(weight: QuantizedWeight, dtype: torch.dtype) -> PackedWeight | LinearWeight:
    return prepare_linear(weight.widened().to(dtype), weight.bias)


def quantized_linear(x: torch.Tensor, weight: PackedWeight | LinearWeight) -> torch.Tensor:
    return linear(x, weight)
