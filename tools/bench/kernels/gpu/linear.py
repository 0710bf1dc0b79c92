"""Products of a 16-bit or 8-bit weight and one row: row_linear in a chain of dependent launches, against cuBLAS.

`shapes` tries other work splits than those in use.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.kernels.reference.fp8_weight import quantize_to_fp8
from quire.kernels.reference.linear import LinearWeight
from quire.kernels.triton.quantization import eight_bit_linear
from quire.kernels.triton.quantization.eight_bit_linear import EightBitWeight
from quire.kernels.triton.single_row.row_linear import RowNorm, RowTile, row_linear, shape_for
from tools.bench.kernels.gpu.timing import READ_BYTES_PER_US, copies_beyond_cache, graph_us
from tools.bench.kernels.timing import BenchRow

# in, out, gated, normed before, added to the residual
PRODUCTS = {
    "0.6b qkv": (1024, 4096, False, True, False),
    "0.6b output": (2048, 1024, False, False, True),
    "0.6b gate and up": (1024, 3072, True, True, False),
    "0.6b down": (3072, 1024, False, False, True),
    "0.6b head": (1024, 151_936, False, True, False),
    "8b qkv": (4096, 6144, False, True, False),
    "8b output": (4096, 4096, False, False, True),
    "8b gate and up": (4096, 14_336, True, True, False),
    "8b down": (14_336, 4096, False, False, True),
    "8b head": (4096, 128_256, False, True, False),
    "half of 70b qkv": (8192, 5120, False, True, False),
    "half of 70b output": (4096, 8192, False, False, False),
    "half of 70b gate and up": (8192, 14_336, True, True, False),
    "half of 70b down": (14_336, 8192, False, False, False),
    "half of 70b head": (8192, 64_128, False, True, False),
}
IN_8_BITS = [name for name in PRODUCTS if name.startswith("8b") and name != "8b head"]
TRIED = [
    RowTile(rows, chunk, ahead, warps)
    for rows, chunk, warps in [
        (2, 1024, 2),
        (4, 1024, 4),
        (8, 1024, 4),
        (8, 1024, 8),
        (4, 2048, 4),
        (4, 2048, 8),
        (8, 2048, 8),
        (2, 4096, 8),
        (4, 4096, 8),
    ]
    for ahead in (1, 2, 3)
]


def bench() -> Iterator[BenchRow]:
    for name, size in _cases():
        yield measure(name, size, {"triton": shape_for(PRODUCTS[name][0], PRODUCTS[name][2], element_size=size)})


def shapes() -> Iterator[BenchRow]:
    """Yields, per product and element size, the five fastest work splits of those tried."""
    for name, size in _cases():
        product = PRODUCTS[name]
        fitting = [s for s in TRIED if product[0] % s.chunk == 0 and s.ahead * s.chunk <= product[0]]
        named = {f"{s.rows}x{s.chunk} ahead {s.ahead} warps {s.warps}": s for s in fitting}
        row = measure(name, size, named)
        best = sorted(row.microseconds.items(), key=lambda item: item[1])[:5]
        yield BenchRow("shapes", row.name, dict(best), row.rate, row.unit)


def _cases() -> Iterator[tuple[str, int]]:
    """Yields names of products and bytes per weight element."""
    yield from ((name, 2) for name in PRODUCTS)
    yield from ((name, 1) for name in IN_8_BITS)


def measure(name: str, element_size: int, ways: dict[str, RowTile]) -> BenchRow:
    """Measures a product of one row with each work split of `ways`, its norm, gate and residual included. A single
    way in 16 bits is compared with cuBLAS; `element_size` is in bytes."""
    in_features, out_features, gated, normed, added = PRODUCTS[name]
    size = (out_features * (2 if gated else 1), in_features)
    num_bytes = size[0] * size[1] * element_size
    make = lambda *shape: torch.randn(*shape, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    weights: list[LinearWeight | EightBitWeight] = []
    for _ in range(copies_beyond_cache(num_bytes, most=32)):
        wide = make(*size)
        in_8_bits = element_size == 1
        weights.append(
            eight_bit_linear.pack(quantize_to_fp8(wide, None, blocks=False)) if in_8_bits else LinearWeight(wide, None)
        )
    x, norm, residual = make(1, in_features), RowNorm(make(in_features), 1e-6), make(1, out_features)
    options = {"norm": norm if normed else None, "gated": gated, "residual": residual if added else None, "pdl": True}
    times = {
        way: graph_us([lambda w=w, s=s: row_linear(x, w, shape=s, **options) for w in weights], 2)
        for way, s in ways.items()
    }
    rate, floor = num_bytes / min(times.values()) / 1e3, num_bytes / READ_BYTES_PER_US
    if len(ways) == 1 and element_size == 2:
        times["cuBLAS"] = graph_us([lambda w=w: functional.linear(x, w.weight) for w in weights], 2)
    return BenchRow(
        "linear", name if element_size == 2 else f"{name}, fp8", {**times, "bytes at 4.55 TB/s": floor}, rate, "GB/s"
    )
