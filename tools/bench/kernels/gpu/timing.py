"""Timing on a GPU inside CUDA graphs, so that launches from Python are not included."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]

# Rates that an H200 reaches (streaming read; 8192³ in bfloat16), for lower bounds.
READ_BYTES_PER_US = 4.55e6
BF16_FLOP_PER_US = 787e6
L2_BYTES = 60 << 20
REPEATS = 7


def graph_us(works: Sequence[Work], rounds: int = 1) -> float:
    """Returns the microseconds of one of `works`, which run one after the other, `rounds` times: the median of REPEATS
    replays.

    Pass several works on different memory, together more than the L2 cache holds.
    """
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for work in works[:2]:
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        for _ in range(rounds):
            for work in works:
                work()
        graph.capture_end()
    torch.cuda.synchronize()
    graph.replay()
    return statistics.median(_replay_us(graph) for _ in range(REPEATS)) / (rounds * len(works))


def _replay_us(graph: torch.cuda.CUDAGraph) -> float:
    """Replays a graph once and returns its time on the GPU in microseconds; synchronizes."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def copies_beyond_cache(num_bytes: int, most: int = 64) -> int:
    """Returns the number of copies of this size to rotate among so that each is cold."""
    return max(2, min(most, -(-4 * L2_BYTES // num_bytes)))
