"""Matrix products with quantized weights: kernels/reference/quantized_linear.py.

Weights alone (packed_linear.py), or weights and activations in 8 bits (eight_bit_linear.py); other weights are
dequantized once, at load.
"""

from __future__ import annotations

import torch

from quire.kernels.reference.linear import LinearWeight, linear
from quire.kernels.reference.quantized_linear import QuantizedWeight
from quire.kernels.triton.quantization import eight_bit_linear as eight_bit
from quire.kernels.triton.quantization.eight_bit_linear import EightBitWeight, eight_bit_linear, eight_bit_takes
from quire.kernels.triton.quantization.packed_linear import packed_linear
from quire.kernels.triton.quantization.packed_weight import PackedWeight, pack, packed_takes

Packed = LinearWeight | EightBitWeight | PackedWeight


def prepare_quantized_linear(weight: QuantizedWeight, dtype: torch.dtype) -> Packed:
    """Packs a quantized weight for products with x in `dtype`: for 8-bit products or packed codes, else dequantized."""
    if eight_bit_takes(weight, dtype):
        return eight_bit.pack(weight)
    if packed_takes(weight, dtype):
        return pack(weight)
    return LinearWeight(weight.dequantized().to(dtype), weight.bias)


def quantized_linear(x: torch.Tensor, weight: Packed) -> torch.Tensor:
    """Computes x @ weight.T + bias: [num_tokens, in_features] -> [num_tokens, out_features], by the kernel of the
    weight's packing."""
    if isinstance(weight, PackedWeight):
        return packed_linear(x, weight)
    if isinstance(weight, EightBitWeight):
        return eight_bit_linear(x, weight)
    return linear(x, weight)
