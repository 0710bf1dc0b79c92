"""Sampling against the reference implementation."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import cpu, reference
from quire.services.worker.sampling.vocabulary.columns import FILTERS
from tools.bench.kernels.timing import BenchRow, medians

SIZES = ((1, 4096), (32, 4096), (1, 151_936), (32, 151_936))  # rows, vocabulary
VALUES = (1.0, 50, 0.9, 0.05)  # of temperature and the filters, in the order of sample()
ALONE = {
    f"{one.name} {value}": (0, place) for place, (one, value) in enumerate(zip(FILTERS, VALUES[1:], strict=True), 1)
}
CASES: dict[str, tuple[int, ...]] = {"greedy": (), "temperature": (0,), **ALONE}  # columns in use


def bench() -> Iterator[BenchRow]:
    """Yields rows for each combination of filters and for grammar masks, per size."""
    for rows, vocab_size in SIZES:
        for name, used in CASES.items():
            yield one(rows, vocab_size, name, used)
        yield mask(rows, vocab_size)


def one(rows: int, vocab_size: int, name: str, used: tuple[int, ...]) -> BenchRow:
    """Measures sampling from [rows, vocab_size] logits with the columns in `used`: indexes of VALUES."""
    logits = 3 * torch.randn(rows, vocab_size)  # may be overwritten; still valid for the next call
    columns = [torch.full((rows,), value) for value in VALUES]
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
