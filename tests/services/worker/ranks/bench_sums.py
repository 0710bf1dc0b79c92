"""What two ranks take to add up, by the size of their parts.

python -m tests.services.worker.ranks.bench_sums [--device cpu]

A GPU each, or gloo. On GPUs both ways in turn, inside of CUDA graphs: NCCL, and the kernel of our own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor, distributed

from services.worker.ranks.local import LOOPBACK, _meeting_place
from services.worker.ranks.peer_memory import MOST_BYTES
from services.worker.ranks.seat import Seat, Together, leave

SIZES = [1 << power for power in range(13, 27)]  # 8 KiB to 64 MiB
IN_A_GRAPH = 20
ROUNDS = 7


def times(seat: Seat, told: Connection, kind: str) -> None:
    """Sends a row for each size: bytes, then microseconds by way."""
    device = torch.device(kind, seat.rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    together = seat.join(device, own_sums=True)[0].collectives
    assert isinstance(together, Together)
    for size in SIZES:
        part = torch.zeros(1, size // 2, dtype=torch.bfloat16, device=device)
        told.send((size, {name: _us(work, kind) for name, work in _ways(together, part)}))
    leave()


def _ways(together: Together, part: Tensor) -> Iterator[tuple[str, Callable[[], object]]]:
    yield distributed.get_backend(), lambda: distributed.all_reduce(part)
    if together.joins_chains and part.nbytes <= MOST_BYTES:
        yield "own", lambda: together.add_up(part)


def _us(work: Callable[[], object], kind: str) -> float:
    work()
    if kind == "cpu":
        return statistics.median(_taken(work) for _ in range(ROUNDS))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(IN_A_GRAPH):
            work()
    graph.replay()
    found = statistics.median(_taken(lambda: (graph.replay(), torch.cuda.synchronize())) for _ in range(ROUNDS))
    graph.reset()  # or NCCL would wait for it in the end
    return found / IN_A_GRAPH


def _taken(work: Callable[[], object]) -> float:
    distributed.barrier()
    started = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    kind = parser.parse_args().device
    store, port = _meeting_place(LOOPBACK, 2)
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(2)]
    seats = [Seat(rank, 2, LOOPBACK, port) for rank in range(2)]
    ranks = [
        context.Process(target=times, args=(seat, theirs, kind), daemon=True)
        for seat, (_, theirs) in zip(seats, ends, strict=True)
    ]
    for rank in ranks:
        rank.start()
    for _ in SIZES:
        size, row = ends[0][0].recv()
        print(f"{size >> 10:>8} KiB  " + "  ".join(f"{name} {us:.1f} us" for name, us in row.items()), flush=True)
    for rank in ranks:
        rank.kill()
    del store


if __name__ == "__main__":
    main()
