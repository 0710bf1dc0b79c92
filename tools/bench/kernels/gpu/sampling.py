"""Sampling from a vocabulary of 151,936, against plain torch."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import reference, triton
from tools.bench.kernels.gpu.timing import graph_us
from tools.bench.kernels.timing import BenchRow

VOCAB_SIZE = 151_936
ROWS = (1, 32, 256)


def bench() -> Iterator[BenchRow]:
    """Yields rows for each way of sampling, for a vocabulary shard, and for grammar masks, per number of rows."""
    for rows in ROWS:
        logits = torch.randn(rows, VOCAB_SIZE, device="cuda")
        half = logits.bfloat16()
        seeds = torch.arange(rows, device="cuda")
        positions = torch.arange(rows, dtype=torch.int32, device="cuda")
        column = lambda value, dtype=torch.float32: torch.full((rows,), value, dtype=dtype, device="cuda")  # noqa: B023, E731
        temperature, top_k, top_p = column(0.6), column(20, torch.int32), column(0.95)
        ways = {
            "greedy": (None, None, None, None),
            "temperature": (temperature, None, None, None),
            "top-k": (temperature, top_k, None, None),
            "top-p": (temperature, None, top_p, None),
            "top-k and top-p": (temperature, top_k, top_p, None),
        }
        for name, way in ways.items():
            times = {
                "triton": graph_us([lambda w=way: triton.sample(half, *w, seeds, positions)] * 4),  # noqa: B023
                "torch": graph_us([lambda w=way: reference.sample(logits, *w, seeds, positions)]),  # noqa: B023
            }
            yield BenchRow("sampling", f"{name} {rows}", times, 0, "")
        yield from _bench_part(half[:, : VOCAB_SIZE // 2], temperature, seeds, positions)
        masks = torch.randint(-(2**31), 2**31 - 1, (rows, -(-VOCAB_SIZE // 32)), dtype=torch.int32, device="cuda")
        times = {
            "triton": graph_us([lambda: triton.mask_logits(logits, None, masks)] * 4),  # noqa: B023
            "torch": graph_us([lambda: reference.mask_logits(logits, None, masks)]),  # noqa: B023
        }
        yield BenchRow("sampling", f"grammar mask {rows}", times, 0, "")


def _bench_part(
    half: torch.Tensor, temperature: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> Iterator[BenchRow]:
    """Measures one of two ranks: its best token, and a round of the filter's search."""
    rows, values = len(half), half.float()
    tops, known = values.amax(dim=1, keepdim=True), torch.zeros((rows, 1), dtype=torch.int64, device="cuda")
    for name, column in (("greedy", None), ("temperature", temperature)):
        times = {
            "triton": graph_us([lambda c=column: triton.best_of_part(half, c, seeds, positions, VOCAB_SIZE)] * 4),
            "torch": graph_us([lambda c=column: reference.best_of_part(half, c, seeds, positions, VOCAB_SIZE)]),
        }
        yield BenchRow("sampling", f"part, {name} {rows}", times, 0, "")
    for name, of in (("counts", None), ("weights", tops)):
        times = {
            "triton": graph_us([lambda o=of: triton.digit_sums(values, o, known, 24)] * 4),
            "torch": graph_us([lambda o=of: reference.digit_sums(values, o, known, 24)]),
        }
        yield BenchRow("sampling", f"part, {name} {rows}", times, 0, "")
