"""Latent attention against the reference, and against attention with separate keys and values per head."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import cpu, reference
from tools.bench.kernels.timing import BenchRow, medians

BLOCK = 16
RANK, ROPE = 512, 64
OWN = 192  # elements of a head's keys, and of its values padded with zeros
HEADS = {"v2-lite": 16, "v3": 128}
DECODES = ((1, 128), (1, 4096), (8, 1024), (32, 512))  # sequences, length
PROMPTS = (128, 512, 2048)


def bench() -> Iterator[BenchRow]:
    """Yields rows for decodes, prompts, and the products with stacked weights, per dtype."""
    for dtype in (torch.bfloat16, torch.float32):
        for model in HEADS:
            for sequences, length in DECODES:
                yield attend(dtype, model, sequences, length, 1)
        for length in PROMPTS:
            yield attend(dtype, "v2-lite", 1, length, length)
        for rows in (1, 8, 128):
            yield multiply(dtype, rows)


def attend(dtype: torch.dtype, model: str, sequences: int, length: int, rows: int) -> BenchRow:
    """Measures latent attention of `rows` query rows per sequence against the reference, and against keys and values
    per head where those fit into memory."""
    heads, width = HEADS[model], -(-length // BLOCK)
    blocks = sequences * width
    cache = torch.randn(blocks + 1, BLOCK, 1, RANK + ROPE).to(dtype)
    tables = (torch.randperm(blocks) + 1).view(sequences, width).int()
    start, lens = (torch.arange(sequences + 1) * rows).int(), torch.full((sequences,), length).int()
    q = torch.randn(sequences * rows, heads, RANK).to(dtype)
    rotated = torch.randn(sequences * rows, heads, ROPE).to(dtype)
    calls = {
        "cpu": lambda: cpu.latent_attention(q, rotated, cache, tables, start, lens, 0.1),
        "reference": lambda: reference.latent_attention(q, rotated, cache, tables, start, lens, 0.1),
    }
    if blocks * BLOCK * heads * OWN < 1 << 26:
        own_q = torch.randn(sequences * rows, heads, OWN).to(dtype)
        own = [torch.randn(blocks + 1, BLOCK, heads, OWN).to(dtype) for _ in range(2)]
        calls["own keys"] = lambda: cpu.paged_attention(own_q, *own, tables, start, lens, 0.1, 0)
    times = medians(calls)
    pairs = sequences * (length if rows == 1 else length * (length + 1) // 2)
    case = f"{model} {str(dtype)[6:]} {'decode' if rows == 1 else 'prefill'} {sequences} x {length}"
    return BenchRow("latent", case, times, 2 * pairs * heads * (2 * RANK + ROPE) / times["cpu"] / 1e3, "GFLOP/s")


def multiply(dtype: torch.dtype, rows: int) -> BenchRow:
    """Measures the product that computes queries for compressed vectors, with 16 heads."""
    weight = torch.randn(16, RANK, 128).to(dtype)
    x, packed = torch.randn(rows, 16, 192).to(dtype)[..., :128], cpu.prepare_head_linear(weight)
    plain = reference.prepare_head_linear(weight)
    times = medians({"cpu": lambda: cpu.head_linear(x, packed), "reference": lambda: reference.head_linear(x, plain)})
    return BenchRow("latent", f"heads {str(dtype)[6:]} {rows} rows", times, weight.nbytes / times["cpu"] / 1e3, "GB/s")
