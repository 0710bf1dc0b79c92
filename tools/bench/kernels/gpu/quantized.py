"""Products with quantized weights against cuBLAS in bfloat16: microseconds, the rate at which the weight's bytes are
read, and the minimum time for these bytes.

`packed_rows` has 4-bit codes and many rows. `eight_bit_shapes` tries other splits of 8-bit products than those in
use, and torch's libraries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from quire.kernels.triton.quantization import eight_bit_linear as eight_bit
from quire.kernels.triton.quantization.eight_bit_activations import quantize
from quire.kernels.triton.quantization.eight_bit_linear import EightBitTile, EightBitWeight
from quire.kernels.triton.quantization.packed_linear import packed_linear, widened
from quire.kernels.triton.quantization.packed_many_rows import packed_many_rows
from quire.kernels.triton.quantization.packed_warp_groups import packed_warp_groups
from quire.kernels.triton.quantization.packed_weight import PackedWeight, pack
from quire.kernels.triton.quantization.quantized_linear import prepare_quantized_linear, quantized_linear
from tools.bench.kernels.gpu.timing import READ_BYTES_PER_US, copies_beyond_cache, graph_us
from tools.bench.kernels.timing import BenchRow

PRODUCTS = {  # in, out
    "8b qkv": (4096, 6144),
    "8b output": (4096, 4096),
    "8b gate and up": (4096, 28_672),
    "8b down": (14_336, 4096),
}
TOKENS = (1, 16, 64, 256, 2048)
BYTE = torch.float8_e4m3fn


def integers(out_features: int, in_features: int, bits: int, group: int) -> QuantizedWeight:
    codes = torch.randint(2**bits, (out_features, in_features), dtype=torch.uint8, device="cuda")
    scales = torch.rand(out_features, in_features // group, device="cuda") / 2**bits
    return QuantizedWeight(codes, scales, torch.full_like(scales, 2 ** (bits - 1)), group, bits)


def bytes_of(out_features: int, in_features: int, kind: torch.dtype, group: int) -> QuantizedWeight:
    """Returns a random 8-bit weight with codes of dtype `kind` and a scale per `group` columns (0: the whole row)."""
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


def bench() -> Iterator[BenchRow]:
    for product, (in_features, out_features) in PRODUCTS.items():
        for scheme, make in SCHEMES.items():
            yield from measure(f"{product}, {scheme}", make(out_features, in_features))


def measure(name: str, weight: QuantizedWeight) -> Iterator[BenchRow]:
    """Yields a row per number of tokens: our product, cuBLAS in bfloat16, and the activations' quantization."""
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
        times["bytes at 4.55 TB/s"] = num_bytes / READ_BYTES_PER_US
        yield BenchRow("quantized", f"{name}, {tokens} rows", times, num_bytes / times["ours"] / 1e3, "GB/s")


def packed_rows() -> Iterator[BenchRow]:
    """Measures 4-bit codes with many rows: the available kernels (warp groups need Hopper), and cuBLAS."""
    for product, (in_features, out_features) in PRODUCTS.items():
        packed = pack(integers(out_features, in_features, 4, 128))
        copies = [packed, *(_copy(packed) for _ in range(copies_beyond_cache(packed.codes.nbytes, most=8) - 1))]
        wide = [widened(packed, torch.bfloat16) for _ in range(2)]
        for tokens in (65, 128, 256, 384, 512, 768, 1024, 2048, 4096, 8192):
            x = torch.randn(tokens, in_features, dtype=torch.bfloat16, device="cuda")
            ways: dict[str, Callable[[PackedWeight], object]] = {
                "warp groups": lambda w, x=x: packed_warp_groups(x, w),
                "many rows": lambda w, x=x: packed_many_rows(x, w),
                "in use": lambda w, x=x: packed_linear(x, w),
                "widened": lambda w, x=x: functional.linear(x, widened(w, torch.bfloat16)),
            }
            times = {name: graph_us([lambda w=w, way=way: way(w) for w in copies], 2) for name, way in ways.items()}
            times["cuBLAS bf16"] = graph_us([lambda w=w, x=x: functional.linear(x, w) for w in wide], 4)
            flops = 2 * tokens * in_features * out_features
            yield BenchRow(
                "packed_rows", f"{product}, {tokens} rows", times, flops / times["warp groups"] / 1e6, "TFLOP/s"
            )


def _copy(packed: object) -> object:
    tensors = {name: value.clone() for name, value in vars(packed).items() if isinstance(value, torch.Tensor)}
    return type(packed)(**{**vars(packed), **tensors})


def shapes() -> Iterator[BenchRow]:
    """Returns, by product and number of tokens, the five best shapes, the one in use, and torch's own."""
    for scheme, group in (("fp8", 0), ("fp8 blocks", 128)):
        for product, (in_features, out_features) in PRODUCTS.items():
            packed = eight_bit.pack(bytes_of(out_features, in_features, BYTE, group))
            copies = [packed, *(_copy(packed) for _ in range(copies_beyond_cache(packed.codes.nbytes, most=8) - 1))]
            for tokens in (16, 64, 128, 256):
                times = dict(_shapes_of(packed, copies, tokens))
                best = sorted(times.items(), key=lambda item: item[1])[:5]
                name = f"{product}, {scheme}, {tokens} rows"
                rate = packed.codes.nbytes / best[0][1] / 1e3
                yield BenchRow("eight_bit_shapes", name, {**dict(best), "in use": times["in use"]}, rate, "GB/s")


def _shapes_of(packed: EightBitWeight, copies: list[EightBitWeight], tokens: int) -> Iterator[tuple[str, float]]:
    """Yields name and microseconds of the tile in use, of the library if it applies, and of each tile that fits
    `tokens`."""
    x = torch.randn(tokens, packed.codes.size(1), dtype=torch.bfloat16, device="cuda")
    yield "in use", graph_us([lambda w=w: eight_bit.eight_bit_linear(x, w) for w in copies], 2)
    codes, scales = quantize(x, packed.activations)
    if tokens >= 64 and not packed.is_grouped:
        yield "library", graph_us([lambda w=w: eight_bit.by_library(codes, scales, w) for w in copies], 2)
    rows = [16] if tokens <= 16 else [64] if tokens <= 64 else [64, 128]
    widths = ((128, 4), (128, 6)) if packed.is_grouped or tokens > 64 else ((128, 5), (256, 3))
    for row, columns in ((row, columns) for row in rows for columns in (64, 128)):
        for width, stages in widths:
            for splits in (1, 2, 4):
                shape = EightBitTile(row, columns, splits, width, stages, 8 if row * columns > 128 * 64 else 4)
                name = f"{row}x{columns}x{width} /{splits} stages {stages}"
                yield name, graph_us([lambda w=w, s=shape: eight_bit.eight_bit_linear(x, w, s) for w in copies], 2)
