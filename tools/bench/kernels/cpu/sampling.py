"""Sampling against the reference implementation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import cpu, reference
from tools.bench.kernels.timing import BenchRow, medians

SIZES = ((1, 4096), (32, 4096), (1, 151_936), (32, 151_936))  # rows, vocabulary
FILTERS = {"greedy": (), "temperature": (0,), "top_k 50": (0, 1), "top_p 0.9": (0, 2), "min_p 0.05": (0, 3)}


def bench() -> Iterator[BenchRow]:
    """Yields rows for each combination of filters and for grammar masks, per size."""
    for rows, vocab_size in SIZES:
        for name, used in FILTERS.items():
            yield one(rows, vocab_size, name, used)
        yield mask(rows, vocab_size)


def one(rows: int, vocab_size: int, name: str, used: tuple[int, ...]) -> BenchRow:
    """Measures sampling from [rows, vocab_size] logits with the columns in `used`: temperature 0, top-k 1, top-p 2,
    min-p 3."""
    logits = 3 * torch.randn(rows, vocab_size)  # may be overwritten; still valid for the next call
    columns = [torch.full((rows,), value) for value in (1.0, 50, 0.9, 0.05)]
    columns[1] = columns[1].int()
    chosen = [column if i in used else None for i, column in enumerate(columns)]
    arguments = (*chosen, torch.arange(rows), torch.arange(rows).int())
    times = medians(
        {"cpu": lambda: cpu.sample(logits, *arguments), "reference": lambda: reference.sample(logits, *arguments)}
    )
    return BenchRow(
        "sampling", f"{rows} x {vocab_size} {name}", times, rows * vocab_size / times["cpu"] / 1e3, "Glogit/s"
    )


def mask(rows: int, vocab_size: int) -> BenchRow:
    """Measures banning half of the tokens by a bit mask against the reference."""
    logits = torch.randn(rows, vocab_size)
    masks = torch.randint(-(2**31), 2**31 - 1, (rows, -(-vocab_size // 32)), dtype=torch.int32)
    times = medians(
        {
            "cpu": lambda: cpu.mask_logits(logits, None, masks),
            "reference": lambda: reference.mask_logits(logits, None, masks),
        }
    )
    return BenchRow(
        "sampling", f"{rows} x {vocab_size} grammar mask", times, rows * vocab_size / times["cpu"] / 1e3, "Glogit/s"
    )
