"""Paged attention: decode against the reference, prefill against torch's attention over dense tensors."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.nn import functional

from quire.kernels import cpu, reference
from tools.bench.kernels.timing import BenchRow, medians

BLOCK = 16
HEADS = {"tiny": (8, 4, 32), "0.6b": (16, 8, 128)}  # query heads, key heads, head_dim
DECODES = ((1, 128), (1, 4096), (32, 128), (32, 512), (16, 4096))  # sequences, length
PROMPTS = (128, 512, 2048)


def bench() -> Iterator[BenchRow]:
    """Yields a row per dtype and model for each decode and each prompt."""
    for dtype in (torch.bfloat16, torch.float32):
        for model in HEADS:
            for sequences, length in DECODES:
                yield decode(dtype, model, sequences, length)
            for length in PROMPTS:
                yield prefill(dtype, model, length)


def inputs(dtype: torch.dtype, model: str, sequences: int, length: int, rows: int):
    """Returns the arguments of paged_attention with blocks in random order: q, caches, block tables, row starts,
    lengths. Each sequence has `rows` query rows and `length` positions."""
    q_heads, kv_heads, head_dim = HEADS[model]
    width = -(-length // BLOCK)
    blocks = sequences * width
    caches = [torch.randn(blocks + 1, BLOCK, kv_heads, head_dim).to(dtype) for _ in range(2)]
    tables = (torch.randperm(blocks) + 1).view(sequences, width).int()
    q = torch.randn(sequences * rows, q_heads, head_dim).to(dtype)
    start = (torch.arange(sequences + 1) * rows).int()
    return q, *caches, tables, start, torch.full((sequences,), length).int()


def decode(dtype: torch.dtype, model: str, sequences: int, length: int) -> BenchRow:
    """Measures one query row per sequence against the reference; the rate is bytes of KV read per second."""
    arguments = inputs(dtype, model, sequences, length, 1)
    times = medians(
        {
            "cpu": lambda: cpu.paged_attention(*arguments, 0.1, 0),
            "reference": lambda: reference.paged_attention(*arguments, 0.1, 0),
        }
    )
    num_bytes = sum(cache.nbytes for cache in arguments[1:3])
    case = f"{model} {str(dtype)[6:]} decode {sequences} x {length}"
    return BenchRow("attention", case, times, num_bytes / times["cpu"] / 1e3, "GB/s")


def prefill(dtype: torch.dtype, model: str, length: int) -> BenchRow:
    """Measures a whole prompt against torch's attention over dense tensors; the rate counts the lower triangle only."""
    q_heads, kv_heads, head_dim = HEADS[model]
    arguments = inputs(dtype, model, 1, length, length)
    q, k, v = (torch.randn(1, heads, length, head_dim).to(dtype) for heads in (q_heads, kv_heads, kv_heads))
    times = medians(
        {
            "cpu": lambda: cpu.paged_attention(*arguments, 0.1, 0),
            "torch": lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True),
        }
    )
    products = q_heads * head_dim * length * (length + 1)  # scores and values, half of the square
    case = f"{model} {str(dtype)[6:]} prefill {length}"
    return BenchRow("attention", case, times, 2 * products / times["cpu"] / 1e3, "GFLOP/s")
