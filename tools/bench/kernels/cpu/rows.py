"""Functions of single rows against the reference; with one row they measure the cost of a call."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import cpu, reference
from tools.bench.kernels.timing import BenchRow, Work, medians

SHAPES = {"tiny": (256, 768, 8, 4, 32), "0.6b": (1024, 3072, 16, 8, 128)}  # hidden, ffn, heads, head_dim
ROWS = (1, 32, 512)


def bench() -> Iterator[BenchRow]:
    """Yields a row per model shape, number of rows and function."""
    for model, shape in SHAPES.items():
        for rows in ROWS:
            for name, works in functions(shape, rows).items():
                yield BenchRow("rows", f"{model} bfloat16 {name} {rows}", medians(works), 0, "")


def functions(shape: tuple[int, ...], rows: int) -> dict[str, dict[str, Work]]:
    """Returns, by name, calls of each function in both packages on the same random inputs."""
    hidden, ffn, q_heads, kv_heads, head_dim = shape
    make = lambda *size: torch.randn(*size).to(torch.bfloat16)  # noqa: E731
    x, residual, weight, gate_up = make(rows, hidden), make(rows, hidden), make(hidden), make(rows, 2 * ffn)
    qkv, head_weight = make(rows, (q_heads + 2 * kv_heads) * head_dim), make(head_dim)
    caches = make(2, 64, 16, kv_heads, head_dim)
    positions = torch.arange(rows).int()
    heads = head_weight, head_weight, 1e-6, torch.randn(1024, head_dim), positions, positions, *caches
    table = make(4096, hidden)
    packages = {"cpu": cpu, "reference": reference}

    def rivals(compute) -> dict[str, Work]:
        return {name: lambda package=package: compute(package) for name, package in packages.items()}

    return {
        "embed": rivals(lambda package: package.embed(positions, table)),
        "rms_norm": rivals(lambda package: package.rms_norm(x, weight, 1e-6)),
        "add_rms_norm": rivals(lambda package: package.add_rms_norm(x, residual, weight, 1e-6)),
        "silu_mul": rivals(lambda package: package.silu_mul(gate_up)),
        "qk_norm_rope_store": rivals(lambda package: package.qk_norm_rope_store(qkv, *heads, q_heads, kv_heads)),
    }
