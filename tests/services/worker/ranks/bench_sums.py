"""What ranks take to add up, by the size of their parts.

python -m tests.services.worker.ranks.bench_sums [--device cpu] [--ranks 2] [--programs 8,16,32] [--products]

A GPU each, or gloo. On GPUs all ways in turn, inside of CUDA graphs: NCCL, one shot and two shots of our own, the
latter with so many programs. `--products`: instead, the product of so many rows before such a sum, [rows, in] x
[in, 4096] in bfloat16: alone, with NCCL's sum behind it, with two shots of so many programs, and in so many pieces that
copy engines bring over beside it; without graphs, but launched before the GPU begins.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection

import torch
from torch import Tensor, distributed

from quire.services.worker.ranks.collectives.copy_engine_sums import CopyEngineSums, RowPieces
from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from quire.services.worker.ranks.collectives.peer_memory import ONE_SHOT_MAX_BYTES, open_exchange
from quire.services.worker.ranks.placement import RankPlacement, leave
from quire.services.worker.ranks.replica_ranks import LOOPBACK, _create_store

SIZES = [1 << power for power in range(13, 28)]  # 8 KiB to 128 MiB
FEW = 256 << 10  # two shots are not asked for less
IN_A_GRAPH = 20
LAUNCHED = 10
LAUNCHING = 20_000_000  # cycles, in which all of them are launched
ROUNDS = 7
PRODUCTS = [(rows, inputs) for inputs in (2048, 7168) for rows in (2048, 4096, 8192)]  # of Llama-3-8B's halves
PIECES = (2, 4, 8)
Work = Callable[[], object]


def times(placement: RankPlacement, told: Connection, kind: str, programs: tuple[int, ...]) -> None:
    """Sends a row for each size: a description, then microseconds by method."""
    device = torch.device(kind, placement.rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    collectives = placement.join(device, use_custom_all_reduce=True)[0].collectives
    assert isinstance(collectives, GroupCollectives)
    exchanges = dict(_exchanges(placement, device, programs)) if collectives.fuses_residual_add else {}
    for size in SIZES:
        part = torch.zeros(1, size // 2, dtype=torch.bfloat16, device=device)
        found = {name: _us(work, kind) for name, work in _ways(collectives, exchanges, part)}
        told.send((f"{size >> 10:>8} KiB", found))
    leave()


def _exchanges(
    placement: RankPlacement, device: torch.device, programs: tuple[int, ...]
) -> Iterator[tuple[str, object]]:
    store = distributed.distributed_c10d._get_default_store()
    for count in programs:
        name = f"two shots, {count}"
        exchange = open_exchange(store, placement.rank, placement.size, device, num_programs=count, name=name)
        assert exchange is not None, "one shot could"
        yield name, exchange


def _ways(collectives: GroupCollectives, exchanges: dict[str, object], part: Tensor) -> Iterator[tuple[str, Work]]:
    yield distributed.get_backend(), lambda: distributed.all_reduce(part)
    if collectives.fuses_residual_add and part.nbytes <= ONE_SHOT_MAX_BYTES:
        yield "one shot", lambda: collectives.all_reduce(part)
    for name, exchange in exchanges.items() if part.nbytes >= FEW else ():
        from quire.kernels.triton.two_shot_sums import two_shot_sum_of_ranks

        yield name, functools.partial(two_shot_sum_of_ranks, part, exchange)


def products(placement: RankPlacement, told: Connection, kind: str, programs: tuple[int, ...]) -> None:
    """Sends rows for products followed by sums, like times()."""
    device = torch.device(kind, placement.rank)
    torch.cuda.set_device(device)
    collectives = placement.join(device, use_custom_all_reduce=True, overlaps=True)[0].collectives
    assert isinstance(collectives, GroupCollectives)
    exchanges = dict(_exchanges(placement, device, programs))
    for num_rows, inputs in PRODUCTS:
        rows = torch.randn(num_rows, inputs, dtype=torch.bfloat16, device=device)
        weight = torch.randn(4096, inputs, dtype=torch.bfloat16, device=device)
        make = functools.partial(torch.nn.functional.linear, weight=weight)
        ways = {"alone": functools.partial(make, rows), **dict(_sums_of(collectives, exchanges, rows, make))}
        told.send((f"{num_rows} x {inputs}", {name: _us_launched(work) for name, work in ways.items()}))
    leave()


def _sums_of(
    collectives: GroupCollectives, exchanges: dict[str, object], rows: Tensor, make: Callable[[Tensor], Tensor]
) -> Iterator[tuple[str, Work]]:
    from quire.kernels.triton.two_shot_sums import two_shot_sum_of_ranks

    yield "NCCL", lambda: distributed.all_reduce(make(rows))
    for name, exchange in exchanges.items():
        yield name, functools.partial(lambda exchange: two_shot_sum_of_ranks(make(rows), exchange), exchange)
    beside = collectives._overlapped
    assert isinstance(beside, CopyEngineSums)
    for count in PIECES:
        cuts = RowPieces(1, count).split(rows.size(0))
        yield f"copied in {count}", functools.partial(beside.overlapped_all_reduce, rows, cuts, make)


def _us_launched(work: Work) -> float:
    work()
    found = []
    for _ in range(ROUNDS):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        distributed.barrier()
        torch.cuda._sleep(LAUNCHING)
        began.record()
        for _ in range(LAUNCHED):
            work()
        ended.record()
        torch.cuda.synchronize()
        found.append(1e3 * began.elapsed_time(ended) / LAUNCHED)
    return statistics.median(found)


def _us(work: Work, kind: str) -> float:
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


def _taken(work: Work) -> float:
    distributed.barrier()
    started = time.perf_counter()
    work()
    return 1e6 * (time.perf_counter() - started)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--programs", default="16,32,64", help="of two shots")
    parser.add_argument("--products", action="store_true")
    asked = parser.parse_args()
    programs = tuple(map(int, asked.programs.split(",")))
    work, count = (products, len(PRODUCTS)) if asked.products else (times, len(SIZES))
    store, port = _create_store(LOOPBACK, asked.ranks)
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(asked.ranks)]
    placements = [RankPlacement(rank, asked.ranks, LOOPBACK, port) for rank in range(asked.ranks)]
    ranks = [
        context.Process(target=work, args=(placement, theirs, asked.device, programs), daemon=True)
        for placement, (_, theirs) in zip(placements, ends, strict=True)
    ]
    for rank in ranks:
        rank.start()
    for _ in range(count):
        what, row = ends[0][0].recv()
        print(f"{what}  " + "  ".join(f"{name} {us:.1f} us" for name, us in row.items()), flush=True)
    for rank in ranks:
        rank.kill()
    del store


if __name__ == "__main__":
    main()
