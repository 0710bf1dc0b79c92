"""Recurrent layers in the shape of Qwen3-Next-80B-A3B: one layer's convolution, gated delta rule and norm."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import torch

from quire.kernels import cpu, reference
from quire.kernels.state_pages import WORD_BYTES, StatePages, StateShape
from tools.bench.kernels.timing import BenchRow, medians

SHAPE = StateShape(num_channels=8192, conv_width=4, num_heads=32, key_dim=128, value_dim=128)
BLOCK = 1088
CASES = ((1, 1), (4, 1), (16, 1), (1, 128), (1, 512))  # rows, tokens of each


def bench() -> Iterator[BenchRow]:
    for dtype in (torch.bfloat16, torch.float32):
        for rows, length in CASES:
            yield layer(dtype, rows, length)


def layer(dtype: torch.dtype, rows: int, length: int) -> BenchRow:
    """Measures one recurrent layer for `rows` sequences of `length` new tokens; the rate is bytes of states read and
    written."""
    parts = [torch.zeros(1 + 2 * rows, SHAPE.part_words) for _ in range(2)]
    pages = StatePages(parts[0], parts[1], SHAPE)
    mixed, gates = torch.randn(rows * length, 12288).to(dtype), torch.randn(rows * length, 64).to(dtype)
    weight, norm = torch.randn(8192, 4).to(dtype), torch.ones(128).to(dtype)
    rate, bias = -torch.rand(32), torch.randn(32)
    tables = torch.arange(1, 1 + 2 * rows, dtype=torch.int32).view(rows, 2)
    lens = torch.full((rows,), 100 + length, dtype=torch.int32)
    starts = torch.arange(rows + 1, dtype=torch.int32) * length
    where = pages, tables, None if length == 1 else starts, lens, BLOCK

    def run(package: ModuleType) -> None:
        qkv = package.short_convolution(mixed[:, :8192], weight, *where)
        found = package.gated_delta_rule(qkv, gates[:, :32], gates[:, 32:], rate, bias, *where)
        package.gated_norm(found, mixed[:, 8192:], norm, 1e-6)

    times = medians({"cpu": lambda: run(cpu), "reference": lambda: run(reference)})
    moved = 2 * rows * SHAPE.num_words * WORD_BYTES / times["cpu"] / 1e3
    return BenchRow("recurrent", f"{str(dtype)[6:]} {rows} x {length}", times, moved, "GB/s of states")
