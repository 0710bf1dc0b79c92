"""Functions of single rows against plain torch, in the shapes of a 0.6B and an 8B model."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import reference, triton
from tools.bench.kernels.gpu.timing import graph_us
from tools.bench.kernels.timing import BenchRow

SHAPES = {"0.6b": (1024, 3072, 16, 8, 128), "8b": (4096, 14336, 32, 8, 128)}  # hidden, ffn, heads, head_dim
ROWS = (1, 256, 8192)


def bench() -> Iterator[BenchRow]:
    """Yields a row per model shape, number of rows and function."""
    for model, shape in SHAPES.items():
        for rows in ROWS:
            for name, (ours, plain) in functions(shape, rows).items():
                times = {"triton": graph_us([ours] * 8), "torch": graph_us([plain] * 8)}
                yield BenchRow("rows", f"{model} {name} {rows}", times, 0, "")


def functions(shape: tuple[int, ...], rows: int):
    """Returns, by name, a call in Triton and one in plain torch on the same random inputs."""
    hidden, ffn, q_heads, kv_heads, head_dim = shape
    make = lambda *size: torch.randn(*size, dtype=torch.bfloat16, device="cuda")  # noqa: E731
    x, residual, weight, gate_up = make(rows, hidden), make(rows, hidden), make(hidden), make(rows, 2 * ffn)
    qkv, head_weight = make(rows, (q_heads + 2 * kv_heads) * head_dim), make(head_dim)
    caches = make(2, 256, 64, kv_heads, head_dim)
    positions = torch.arange(rows, dtype=torch.int32, device="cuda")
    cos_sin = torch.randn(8192, head_dim, device="cuda")
    heads = head_weight, head_weight, 1e-6, cos_sin, positions, positions, *caches, q_heads, kv_heads
    calls = {
        "add_rms_norm": lambda package: package.add_rms_norm(x, residual, weight, 1e-6),
        "silu_mul": lambda package: package.silu_mul(gate_up),
        "qk_norm_rope_store": lambda package: package.qk_norm_rope_store(qkv, *heads),
    }
    return {name: (lambda c=c: c(triton), lambda c=c: c(reference)) for name, c in calls.items()}
