"""Sums of GPUs in shared memory, in separate processes, as in a replica."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch

from quire.kernels.reference.rank_sums import sum_of_ranks as reference
from quire.services.worker.ranks.collectives.group_collectives import GroupCollectives
from quire.services.worker.ranks.collectives.peer_memory import CHUNK_BYTES, ONE_SHOT_MAX_BYTES
from quire.services.worker.ranks.placement import RankPlacement, leave
from quire.services.worker.ranks.replica_ranks import LOOPBACK, _create_store

pytestmark = pytest.mark.gpu

FEW = [(1, 4096), (3, 1000), (64, 8192), (1, ONE_SHOT_MAX_BYTES // 2), (513, 2048)]
MANY = [(1024, 4096), (3, CHUNK_BYTES // 2 + 16), (4096, 8192)]  # the last ones in several launches
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
REPLAYS = 2000
CALLS = 300
Check = Callable[[GroupCollectives, int, int, torch.device], list[str]]


def _part(rank: int, shape: tuple[int, int], seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    made = torch.randn(shape, generator=torch.Generator().manual_seed(97 * seed + rank))
    return made.to(dtype)


def _sums(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """Returns the mismatches."""
    wrong = []
    for dtype in DTYPES:
        for seed, shape in enumerate([*FEW, *MANY]):
            parts = [_part(other, shape, seed, dtype).to(device) for other in range(size)]
            got = collectives.all_reduce(parts[rank].clone())
            exact = size == 2 or dtype != torch.float32  # else NCCL's order, where parts are not whole vectors
            if not torch.equal(got, reference(parts)) and (exact or not torch.allclose(got, reference(parts))):
                wrong.append(f"sum of {shape} {dtype}")
            residual = _part(99, shape, seed, dtype).to(device)
            kept = residual.clone()
            collectives.all_reduce_add(kept, parts[rank].clone())
            if not torch.allclose(kept, reference(parts, residual), rtol=0, atol=0 if exact else 1e-5):
                wrong.append(f"sum of {shape} {dtype} into a residual")
    return wrong


def _normed(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """Few rows in one kernel, alternating with sums of other sizes on the same channels, which stay correct."""
    wrong = []
    for seed, shape in enumerate([(1, 4096), (256, 2048), (64, 8192), (5, 5120), (1, 4096)] * 20):
        for dtype in (torch.bfloat16, torch.float16):
            parts = [_part(other, shape, seed, dtype).to(device) for other in range(size)]
            residual, weight = (_part(one, shape, seed, dtype).to(device) for one in (98, 99))
            kept, want = residual.clone(), reference(parts, residual)
            normed = collectives.all_reduce_rms_norm(kept, parts[rank].clone(), weight[0], 1e-5)
            if normed is None:
                wrong += [f"{shape} was left"] if parts[0].nbytes * (size - 1) <= ONE_SHOT_MAX_BYTES else []
                continue
            expected = torch.nn.functional.rms_norm(want.float(), shape[1:], weight[0].float(), 1e-5)
            if not torch.equal(kept, want) or not torch.allclose(normed.float(), expected, rtol=1e-2, atol=1e-3):
                wrong.append(f"normalised sum of {shape} {dtype}")
        collectives.all_reduce(_part(rank, (1, 64 * (1 + seed % 7)), seed).to(device))
    many = torch.zeros(4096, 2048, dtype=torch.bfloat16, device=device)
    left = [many, torch.zeros(4, 1000, dtype=torch.bfloat16, device=device), torch.zeros(1, 2048, device=device)]
    taken = [collectives.all_reduce_rms_norm(x.clone(), x, x.new_zeros(x.size(1)), 1e-5) is not None for x in left]
    return wrong + ([f"taken: {taken}"] if any(taken) else [])


def _recorded(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """A CUDA graph of sums of three sizes, each the input of the next: scaled inputs stay unchanged."""
    sizes = [(1, 4096), (1, 64), (256, 8192)]
    kept = [torch.full(shape, 1.0 + i, dtype=torch.bfloat16, device=device) for i, shape in enumerate(sizes)]
    for x in kept:
        collectives.all_reduce(x.clone())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(4):
            for x in kept:
                x.copy_(collectives.all_reduce(x.clone()) / size)
    for _ in range(REPLAYS):
        graph.replay()
    torch.cuda.synchronize()
    del graph
    return [f"replays of {shape}" for i, shape in enumerate(sizes) if not bool((kept[i] == 1 + i).all())]


def _never_of_another_call(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """Sizes and values change from call to call, and each rank is sometimes late: a sum identifies its call."""
    both, own = random.Random(0), random.Random(rank + 1)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(CALLS):
        dtype = both.choice(DTYPES)
        elements = 16 * both.choice((100, 70_000, 300_000, 600_001, 1_100_000))
        x = torch.full((elements,), float(rank + call % 32), dtype=dtype, device=device)
        if own.random() < 0.3:
            torch.cuda._sleep(own.randrange(1_000_000))
        total = collectives.all_reduce(x)
        wrong += (total != sum(other + call % 32 for other in range(size))).any()
    return [f"{int(wrong)} of {CALLS} calls"] if int(wrong) else []


def _made_in_pieces(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """Overlapped with products and after them; small integers, whose sum does not depend on the order."""
    wrong = []
    seeds = torch.Generator().manual_seed(rank)
    weight = torch.randint(-2, 3, (1024, 4096), generator=seeds).to(device, torch.bfloat16)
    for num_rows in (1, 2048, 5000, 8192, 20_000):
        rows = torch.randint(-1, 2, (num_rows, 1024), generator=seeds).to(device, torch.bfloat16)
        want = collectives.all_reduce((rows @ weight).clone())
        for _ in range(20):
            got = collectives.overlapped_all_reduce(rows, lambda piece: piece @ weight)
            following = got * 1  # in order behind it
            if not torch.equal(following, want):
                wrong.append(f"{num_rows} rows in pieces")
    return wrong


def _never_of_another_piece(collectives: GroupCollectives, rank: int, size: int, device: torch.device) -> list[str]:
    """As _never_of_another_call, for sums overlapped with their products."""
    both, own = random.Random(2), random.Random(rank + 3)
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for call in range(CALLS):
        rows = torch.empty(both.choice((2048, 3000, 8192, 9000)), 1, dtype=both.choice(DTYPES), device=device)
        columns, value = 16 * both.choice((64, 256, 512)), float(rank + call % 32)

        def make(piece: torch.Tensor, columns: int = columns, value: float = value) -> torch.Tensor:
            if own.random() < 0.1:
                torch.cuda._sleep(own.randrange(1_000_000))
            return torch.full((piece.size(0), columns), value, dtype=piece.dtype, device=device)

        total = collectives.overlapped_all_reduce(rows, make)
        wrong += (total != sum(other + call % 32 for other in range(size))).any()
    return [f"{int(wrong)} of {CALLS} calls"] if int(wrong) else []


CHECKS: dict[str, Check] = {
    "sums": _sums,
    "normalised sums": _normed,
    "graphs": _recorded,
    "stale flags": _never_of_another_call,
    "pieces": _made_in_pieces,
    "stale pieces": _never_of_another_piece,
}


def _rank(placement: RankPlacement, told: Connection) -> None:
    device = torch.device("cuda", placement.rank)
    torch.cuda.set_device(device)
    collectives = placement.join(device, use_custom_all_reduce=True, overlaps=True)[0].collectives
    assert isinstance(collectives, GroupCollectives)
    told.send(
        collectives.fuses_residual_add
        and collectives.has_two_shots
        and collectives.has_overlapped_sums == (placement.size == 2)
    )
    for name, check in CHECKS.items():
        told.send((name, check(collectives, placement.rank, placement.size, device)))
    leave()


@pytest.mark.parametrize("size", [2, 4])
def test_gpus_add_up(size: int) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"fewer than {size} GPUs")
    store, port = _create_store(LOOPBACK, size)
    context = multiprocessing.get_context("spawn")
    ours, processes = [], []
    for rank in range(size):
        mine, theirs = context.Pipe()
        ours.append(mine)
        processes.append(
            context.Process(target=_rank, args=(RankPlacement(rank, size, LOOPBACK, port), theirs), daemon=True)
        )
        processes[-1].start()
    try:
        for expected in (True, *((name, []) for name in CHECKS)):
            for mine in ours:
                assert mine.poll(120), f"no answer, {expected} to come"
                assert mine.recv() == expected
    finally:
        for process in processes:
            process.kill()
            process.join()
        del store
