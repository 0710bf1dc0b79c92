"""Expert layers against plain torch: one sequence, a batch, a prompt; weights read from memory."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from quire.kernels import cpu, reference
from quire.kernels.routing import Routing
from tools.bench.kernels.timing import BenchRow, medians

LAYERS = {  # experts, of a token, hidden and intermediate size
    "30b-a3b": (128, 8, 2048, 768),
    "small": (16, 4, 512, 256),
}
TOKENS = (1, 8, 32, 256)


def bench() -> Iterator[BenchRow]:
    """Yields a row per dtype, layer and number of tokens."""
    for dtype in (torch.bfloat16, torch.float32):
        for name, shape in LAYERS.items():
            for num_tokens in TOKENS:
                yield one(dtype, name, shape, num_tokens)


def one(dtype: torch.dtype, name: str, shape: tuple[int, ...], num_tokens: int) -> BenchRow:
    """Measures one case. Every call has different tokens, so that one sequence usually reads different experts."""
    num_experts, top_k, hidden, size = shape
    gate_up = torch.randn(num_experts, 2 * size, hidden).to(dtype)
    down = torch.randn(num_experts, hidden, size).to(dtype)
    packed, plain = cpu.prepare_experts(gate_up, down), reference.prepare_experts(gate_up, down)
    x, logits = torch.randn(num_tokens, hidden).to(dtype), torch.randn(64, num_tokens, num_experts).to(dtype)
    turn = 0

    def run(package, weights) -> None:
        nonlocal turn
        turn = (turn + 1) % len(logits)
        package.experts(x, *package.route(logits[turn], Routing(top_k)), weights)

    times = medians({"cpu": lambda: run(cpu, packed), "torch": lambda: run(reference, plain)})
    chosen = sum(len(reference.route(each, Routing(top_k))[0].unique()) for each in logits) / len(logits)
    case = f"{str(dtype)[6:]} {name}, {num_tokens} tokens"
    if num_tokens <= 8:
        return BenchRow(
            "experts", case, times, chosen * 3 * size * hidden * dtype.itemsize / times["cpu"] / 1e3, "GB/s"
        )
    return BenchRow("experts", case, times, 6 * num_tokens * top_k * size * hidden / times["cpu"] / 1e3, "GFLOP/s")
