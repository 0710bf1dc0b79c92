"""Sums of two GPUs in memory that they share: two processes, as a replica has them."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from kernels.reference.rank_sums import sum_of_ranks as reference
from services.worker.ranks.local import LOOPBACK, _meeting_place
from services.worker.ranks.peer_memory import MOST_BYTES
from services.worker.ranks.seat import Seat, Together, leave

pytestmark = pytest.mark.gpu

SHAPES = [(1, 4096), (3, 1000), (64, 8192), (1, MOST_BYTES // 2), (513, 2048)]
REPLAYS = 2000


def _part(rank: int, shape: tuple[int, int], seed: int) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + rank))
    return made.to(torch.bfloat16)


def _sums(together: Together, rank: int, device: torch.device) -> list[str]:
    """What is wrong."""
    wrong = []
    for seed, shape in enumerate(SHAPES):
        parts = [_part(other, shape, seed) for other in range(2)]
        got = together.add_up(parts[rank].to(device))
        if not torch.equal(got.cpu(), reference(parts)):
            wrong.append(f"sum of {shape}")
        residual = _part(9, shape, seed)
        kept = residual.to(device)
        together.add_up_into(kept, parts[rank].to(device))
        if not torch.equal(kept.cpu(), reference(parts, residual)):
            wrong.append(f"sum of {shape} into a residual")
    return wrong


def _recorded(together: Together, rank: int, device: torch.device) -> list[str]:
    """A graph of sums of two sizes, in turn, each the input of the next: half of twice the same stays what it is."""
    x = _part(0, (1, 4096), 5).to(device)
    want, few = x.clone(), torch.ones(1, 64, dtype=torch.bfloat16, device=device)
    together.add_up(few.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            x.copy_(together.add_up(x.clone()) / 2)
            few.copy_(together.add_up(few.clone()) / 2)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    del graph
    return [] if torch.equal(x, want) and bool((few == 1).all()) else ["replays of a graph"]


def _rank(seat: Seat, told: Connection) -> None:
    device = torch.device("cuda", seat.rank)
    torch.cuda.set_device(device)
    together = seat.join(device, own_sums=True)[0].collectives
    assert isinstance(together, Together)
    told.send((together.joins_chains, _sums(together, seat.rank, device), _recorded(together, seat.rank, device)))
    leave()


def test_two_gpus_add_up() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    store, port = _meeting_place(LOOPBACK, 2)
    context = multiprocessing.get_context("spawn")
    ours, processes = [], []
    for rank in range(2):
        mine, theirs = context.Pipe()
        ours.append(mine)
        processes.append(context.Process(target=_rank, args=(Seat(rank, 2, LOOPBACK, port), theirs), daemon=True))
        processes[-1].start()
    try:
        for mine in ours:
            assert mine.poll(120), "no answer"
            assert mine.recv() == (True, [], [])
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
