"""Linear layers with quantized weights against bfloat16, from memory as in a decode step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from quire.kernels import cpu
from quire.kernels.reference.quantized_linear import QuantizedActivations, QuantizedWeight
from tools.bench.kernels.cpu.linear import COLD, COLD_BYTES
from tools.bench.kernels.timing import BenchRow, medians

ROWS = (1, 2, 4, 8, 32, 256)


def four_bits(out_features: int, in_features: int, group: int) -> QuantizedWeight:
    codes = torch.randint(16, (out_features, in_features)).to(torch.uint8)
    scales = torch.rand(out_features, in_features // group)
    return QuantizedWeight(codes, scales, torch.full_like(scales, 8), group, 4)


def eight_bits(out_features: int, in_features: int, group: int) -> QuantizedWeight:
    codes = torch.randint(-127, 128, (out_features, in_features)).to(torch.int8)
    return QuantizedWeight(codes, torch.rand(out_features, in_features // group), None, group, 8)


def integers(out_features: int, in_features: int) -> QuantizedWeight:
    return replace(eight_bits(out_features, in_features, in_features), activations=QuantizedActivations(torch.int8))


SCHEMES: dict[str, Callable[[int, int], QuantizedWeight]] = {
    "int8 x int8": integers,
    "int8": lambda rows, columns: eight_bits(rows, columns, columns),
    "int8 32": lambda rows, columns: eight_bits(rows, columns, 32),
    "int4 128": lambda rows, columns: four_bits(rows, columns, 128),
    "int4 32": lambda rows, columns: four_bits(rows, columns, 32),
}


def bench() -> Iterator[BenchRow]:
    """Yields a row per shape, scheme and number of rows."""
    for shape in COLD:
        for scheme, make in SCHEMES.items():
            for rows in ROWS:
                yield one(scheme, make, shape, rows)


def one(scheme: str, make: Callable[[int, int], QuantizedWeight], shape: tuple[int, int], rows: int) -> BenchRow:
    """Measures products with a quantized weight against bfloat16; copies in turn make both come from memory."""
    copies = COLD_BYTES // (shape[0] * shape[1] * 2)
    packed = [cpu.prepare_quantized_linear(make(*shape), torch.bfloat16) for _ in range(copies)]
    wide = [cpu.prepare_linear(torch.randn(*shape).bfloat16(), None) for _ in range(copies)]
    x = torch.randn(rows, shape[1]).bfloat16()

    def ours() -> None:
        for weight in packed:
            cpu.quantized_linear(x, weight)

    def theirs() -> None:
        for weight in wide:
            cpu.linear(x, weight)

    times = {name: total / copies for name, total in medians({"quantized": ours, "bfloat16": theirs}).items()}
    rate = 2 * rows * shape[0] * shape[1] / times["quantized"] / 1e3
    return BenchRow("quantized", f"{scheme}, {shape[0]} x {shape[1]}, {rows} rows", times, rate, "GFLOP/s")
