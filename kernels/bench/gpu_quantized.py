"""Products with quantized weights beside cuBLAS in bfloat16: microseconds, the rate at which the weight's own bytes are
read, and how long those bytes would take.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from kernels.bench.gpu_timing import READ_BYTES_PER_US, copies_beyond_cache, graph_us
from kernels.bench.timing import Row
from kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from kernels.triton.eight_bit_linear import EightBitWeight, quantize
from kernels.triton.quantized_linear import prepare_quantized_linear, quantized_linear

PRODUCTS = {"8b qkv": (4096, 6144), "8b gate and up": (4096, 28_672), "8b down": (14_336, 4096)}  # in, out
TOKENS = (1, 16, 64, 256, 2048)
BYTE = torch.float8_e4m3fn


def integers(out_features: int, in_features: int, bits: int, group: int) -> QuantizedWeight:
    codes = torch.randint(2**bits, (out_features, in_features), dtype=torch.uint8, device="cuda")
    scales = torch.rand(out_features, in_features // group, device="cuda") / 2**bits
    return QuantizedWeight(codes, scales, torch.full_like(scales, 2 ** (bits - 1)), group, bits)


def bytes_of(out_features: int, in_features: int, kind: torch.dtype, group: int) -> QuantizedWeight:
    codes = (torch.randn(out_features, in_features, device="cuda") * 30).to(kind)
    scales = torch.rand(out_features, in_features // (group or in_features), device="cuda") / 100
    activations = QuantizedActivations(kind, group)
    return QuantizedWeight(codes, scales, None, group or in_features, 8, activations=activations)


SCHEMES: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "w4a16 128": lambda rows, columns: integers(rows, columns, 4, 128),
    "w4a16 32": lambda rows, columns: integers(rows, columns, 4, 32),
    "w8a16": lambda rows, columns: integers(rows, columns, 8, 128),
    "w8a8 int8": lambda rows, columns: bytes_of(rows, columns, torch.int8, 0),
    "w8a8 fp8": lambda rows, columns: bytes_of(rows, columns, BYTE, 0),
    "w8a8 fp8 blocks": lambda rows, columns: bytes_of(rows, columns, BYTE, 128),
}


def bench() -> Iterator[Row]:
    for product, (in_features, out_features) in PRODUCTS.items():
        for scheme, make in SCHEMES.items():
            yield from measure(f"{product}, {scheme}", make(out_features, in_features))


def measure(name: str, weight: QuantizedWeight) -> Iterator[Row]:
    out_features, in_features = weight.codes.shape
    packed = prepare_quantized_linear(weight, torch.bfloat16)
    num_bytes = packed.codes.nbytes + packed.scales.nbytes
    copies = [packed, *(_copy(packed) for _ in range(copies_beyond_cache(num_bytes, most=16) - 1))]
    wide = [torch.randn(out_features, in_features, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    for tokens in TOKENS:
        x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device="cuda")
        times = {"ours": graph_us([lambda w=w, x=x: quantized_linear(x, w) for w in copies], 2)}
        times["cuBLAS bf16"] = graph_us([lambda w=w, x=x: functional.linear(x, w) for w in wide], 4)
        if isinstance(packed, EightBitWeight):
            times["of which quantizing"] = graph_us([lambda x=x: quantize(x, packed.activations)], 8)
        if isinstance(packed, EightBitWeight) and packed.codes.dtype is BYTE and not packed.is_grouped:
            times["torch scaled_mm"] = graph_us([lambda x=x, w=w: _scaled(x, w) for w in copies], 2)
        times["bytes at 4.55 TB/s"] = num_bytes / READ_BYTES_PER_US
        yield Row("quantized", f"{name}, {tokens} rows", times, num_bytes / times["ours"] / 1e3, "GB/s")


def _copy(packed: object) -> object:
    tensors = {name: value.clone() for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    return type(packed)(**{**vars(packed), **tensors})


def _scaled(x: torch.Tensor, weight: EightBitWeight) -> torch.Tensor:
    """Without the quantizing, by what torch was built with."""
    codes = x.to(BYTE)
    ones = torch.ones(x.size(0), 1, device=x.device)
    scales = weight.scales.view(1, -1)
    return torch._scaled_mm(codes, weight.codes.t(), scale_a=ones, scale_b=scales, out_dtype=torch.bfloat16)
