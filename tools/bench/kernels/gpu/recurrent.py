"""Recurrent layers in the shape of Qwen3-Next-80B-A3B: one layer's convolution and gated delta rule."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from quire.kernels import reference, triton
from quire.kernels.state_pages import WORD_BYTES, StatePages, StateShape
from tools.bench.kernels.gpu.timing import READ_BYTES_PER_US, graph_us
from tools.bench.kernels.timing import BenchRow

SHAPE = StateShape(num_channels=8192, conv_width=4, num_heads=32, key_dim=128, value_dim=128)
BLOCK_SIZE = 1088
DECODES = (1, 16, 64, 256)  # rows
PROMPTS = ((1, 512), (1, 2048), (4, 2048), (1, 8192))  # rows, tokens of each


def bench() -> Iterator[BenchRow]:
    """Yields rows for decodes, with the minimum time for the states' bytes, and for prompts without torch."""
    for rows in DECODES:
        calls = functions(rows, 1)
        times = {name: graph_us([call] * 4) for name, call in calls.items()}
        floor = rows * 2 * SHAPE.num_words * WORD_BYTES / READ_BYTES_PER_US
        yield BenchRow("recurrent", f"decode {rows}", times, floor, "state read and written")
    for rows, length in PROMPTS:
        times = {name: graph_us([call]) for name, call in functions(rows, length).items() if name != "torch"}
        yield BenchRow("recurrent", f"prompt {rows} x {length}", times, 0, "")


def functions(rows: int, length: int) -> dict[str, Callable[[], object]]:
    """Returns calls of the convolution and of the delta rule for `rows` sequences of `length` new tokens."""
    make = lambda *size: torch.randn(*size, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    width = -(-length // BLOCK_SIZE) + 1
    parts = [torch.zeros(1 + rows * width, SHAPE.part_words, device="cuda") for _ in range(2)]
    pages = StatePages(parts[0], parts[1], SHAPE)
    mixed, gates, weight = make(rows * length, 12288), make(rows * length, 64), make(8192, 4)
    rate, bias = -torch.rand(32, device="cuda"), torch.randn(32, device="cuda")
    tables = torch.arange(1, 1 + rows * width, dtype=torch.int32, device="cuda").view(rows, width)
    lens = torch.full((rows,), 700 + length, dtype=torch.int32, device="cuda").clamp(max=width * BLOCK_SIZE)
    starts = torch.arange(rows + 1, dtype=torch.int32, device="cuda") * length
    where = pages, tables, None if length == 1 else starts, lens, BLOCK_SIZE
    qkv = triton.short_convolution(mixed[:, :8192], weight, *where)
    rule = lambda package: package.gated_delta_rule(qkv, gates[:, :32], gates[:, 32:], rate, bias, *where)  # noqa: E731
    return {
        "convolution": lambda: triton.short_convolution(mixed[:, :8192], weight, *where),
        "rule": lambda: rule(triton),
        "torch": lambda: rule(reference),
    }
