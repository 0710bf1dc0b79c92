"""Linear layers against torch (oneDNN): weights in the cache, and weights from memory as in a decode step."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.kernels import cpu
from tools.bench.kernels.timing import BenchRow, medians

WARM = ((512, 256), (256, 768), (1024, 1024), (2048, 2048))  # out_features, in_features
COLD = ((4096, 1024), (6144, 1024), (1024, 3072))  # of a 0.6 B model
COLD_BYTES = 128 << 20  # of weights used in rotation: four times the last level cache of the machine in anchors.md
ROWS = (1, 4, 8, 16, 32, 256, 2048)


def bench() -> Iterator[BenchRow]:
    """Yields rows for weights that stay in the cache, and for weights that are read from memory."""
    for dtype in (torch.bfloat16, torch.float32):
        for shape in WARM:
            for rows in ROWS:
                yield one(dtype, shape, rows, 1)
        for shape in COLD:
            for rows in ROWS[:5]:
                yield one(dtype, shape, rows, COLD_BYTES // (shape[0] * shape[1] * dtype.itemsize))


def one(dtype: torch.dtype, shape: tuple[int, int], rows: int, copies: int) -> BenchRow:
    """Measures a product over `copies` weights in turn, so that many copies exceed the cache; times are per product.
    Up to 4 rows the rate is GB/s, else GFLOP/s."""
    weights = [torch.randn(*shape).to(dtype) for _ in range(copies)]
    packed = [cpu.prepare_linear(weight, None) for weight in weights]
    x = torch.randn(rows, shape[1]).to(dtype)

    def ours() -> None:
        for weight in packed:
            cpu.linear(x, weight)

    def theirs() -> None:
        for weight in weights:
            functional.linear(x, weight)

    times = {name: total / copies for name, total in medians({"cpu": ours, "torch": theirs}).items()}
    case = f"{str(dtype)[6:]} {shape[0]} x {shape[1]}, {rows} rows{', cold' if copies > 1 else ''}"
    products, num_bytes = rows * shape[0] * shape[1], shape[0] * shape[1] * dtype.itemsize
    if rows <= 4:
        return BenchRow("linear", case, times, num_bytes / times["cpu"] / 1e3, "GB/s")
    return BenchRow("linear", case, times, 2 * products / times["cpu"] / 1e3, "GFLOP/s")
