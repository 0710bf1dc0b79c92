"""Two-shot all-reduce: the other ranks' data is written in advance, so that ranks can run one after the other; and
concurrent ranks in processes with shared memory."""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Sequence
from multiprocessing.connection import Connection

import pytest
import torch

from quire.kernels.reference.rank_sums import sum_of_ranks as reference
from quire.kernels.triton.two_shot_sums import (
    ALIGNED,
    BLOCK_BYTES,
    MOST_PROGRAMS,
    SumExchange,
    flag_bytes,
    region_bytes,
    two_shot_sum_of_ranks,
    two_shot_sum_takes,
)
from tests.interpreter import ON_GPU

SIXTEEN = torch.float16  # the interpreter truncates bfloat16
CHUNK_BYTES = 3 * BLOCK_BYTES
PROGRAMS = 2  # fewer than blocks of a chunk


def exchange(rank: int, regions: Sequence[torch.Tensor]) -> SumExchange:
    device = regions[0].device
    addresses = torch.tensor([region.data_ptr() for region in regions], device=device)
    return SumExchange(rank, CHUNK_BYTES, PROGRAMS, addresses, torch.zeros(PROGRAMS, dtype=torch.int32, device=device))


def memory(num_ranks: int) -> list[torch.Tensor]:
    return [torch.zeros(region_bytes(num_ranks, CHUNK_BYTES), dtype=torch.uint8) for _ in range(num_ranks)]


class Host:
    """Memory of all ranks in one process."""

    def __init__(self, num_ranks: int, device: torch.device) -> None:
        self.size = num_ranks
        self.regions = [region.to(device) for region in memory(num_ranks)]
        self.exchanges = [exchange(rank, self.regions) for rank in range(num_ranks)]

    def flags(self, at: int) -> torch.Tensor:
        """Returns the flags, [2, num_ranks - 1, MOST_PROGRAMS]."""
        flags = self.regions[at][: flag_bytes(self.size)].view(torch.int32)
        return flags.view(2, self.size - 1, MOST_PROGRAMS)

    def chunks(self, at: int, dtype: torch.dtype) -> torch.Tensor:
        """Returns the chunks, [2, num_ranks - 1, elements]."""
        return self.regions[at][flag_bytes(self.size) :].view(dtype).view(2, self.size - 1, -1)

    def deliver(self, to: int, parts: list[torch.Tensor], call: int) -> None:
        """Writes the other ranks' data and flags of a call, for every program."""
        chunk = -(-parts[0].numel() // self.size // ALIGNED) * ALIGNED
        total = reference(parts).view(-1)
        chunks = self.chunks(to, total.dtype)
        for rank in range(self.size):
            if rank == to:
                continue
            slot = (rank - to) % self.size - 1
            given = parts[rank].view(-1)[to * chunk : (to + 1) * chunk]
            chunks[0, slot, : given.numel()] = given
            added = total[rank * chunk : (rank + 1) * chunk]
            chunks[1, slot, : added.numel()] = added
        self.flags(to).fill_(call)


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("dtype", [SIXTEEN, torch.float32])
@pytest.mark.parametrize("adds", [False, True])
def test_every_rank_gets_the_sum(device: torch.device, num_ranks: int, dtype: torch.dtype, adds: bool) -> None:
    host = Host(num_ranks, device)
    most = num_ranks * CHUNK_BYTES // dtype.itemsize
    for call, num_elements in enumerate((ALIGNED, most, 5 * ALIGNED, most // 2 + ALIGNED), 1):
        parts = [torch.randn(1, num_elements).to(device, dtype) for _ in range(num_ranks)]
        residual = torch.randn(1, num_elements).to(device, dtype) if adds else None
        want = reference(parts, residual.clone() if residual is not None else None)
        for rank, exchanged in enumerate(host.exchanges):
            exchanged.calls.fill_(call - 1)  # also for programs unused by some of the sums
            host.deliver(rank, parts, call)
            kept = None if residual is None else residual.clone()
            got = two_shot_sum_of_ranks(parts[rank].clone(), exchanged, kept)
            assert torch.equal(got, want)
            assert kept is None or got is kept


def test_sum_has_its_own_output_and_inputs_are_unchanged(device: torch.device) -> None:
    host = Host(2, device)
    parts = [torch.randn(4, 64).to(device, SIXTEEN) for _ in range(2)]
    mine, out = parts[0].clone(), torch.zeros_like(parts[0])
    host.deliver(0, parts, call=1)
    assert two_shot_sum_of_ranks(mine, host.exchanges[0], out=out) is out
    assert torch.equal(out, reference(parts))
    assert torch.equal(mine, parts[0])


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_wait_for_the_flags_of_others(device: torch.device, num_ranks: int) -> None:
    host = Host(num_ranks, device)
    parts = [torch.randn(num_ranks, 64).to(device, SIXTEEN) for _ in range(num_ranks)]
    for rank in range(num_ranks):
        host.deliver(rank, parts, call=1)
        own = host.regions[rank].clone()
        two_shot_sum_of_ranks(parts[rank].clone(), host.exchanges[rank])
        assert torch.equal(host.regions[rank], own)  # it writes only to others
        host.regions[rank].zero_()
    written = Host(num_ranks, device)
    for rank in range(num_ranks):
        written.deliver(rank, parts, call=1)
        written.flags(rank)[:, :, 1:] = 0  # of the only program of such a sum
    for rank in range(num_ranks - 1):  # data written to the last one was overwritten
        for other in range(rank + 1, num_ranks):
            slot = (other - rank) % num_ranks - 1
            assert torch.equal(host.chunks(rank, SIXTEEN)[:, slot], written.chunks(rank, SIXTEEN)[:, slot])
            assert torch.equal(host.flags(rank)[:, slot], written.flags(rank)[:, slot])


def test_call_numbers_wrap_around_without_zero(device: torch.device) -> None:
    host = Host(2, device)
    host.exchanges[0].calls.fill_(-2)
    for call in (-1, 1, 2):
        parts = [torch.randn(1, 64).to(device, SIXTEEN) for _ in range(2)]
        host.deliver(0, parts, call)
        assert torch.equal(two_shot_sum_of_ranks(parts[0].clone(), host.exchanges[0]), reference(parts))


def test_unaligned_or_other_tensors_are_not_supported() -> None:
    assert two_shot_sum_takes(torch.zeros(3, ALIGNED, dtype=torch.bfloat16))
    assert two_shot_sum_takes(torch.zeros(ALIGNED))
    assert not two_shot_sum_takes(torch.zeros(ALIGNED + 8))
    assert not two_shot_sum_takes(torch.zeros(ALIGNED, dtype=torch.float64))
    assert not two_shot_sum_takes(torch.zeros(0))


CALLS = 12


def parts_of(call: int, num_ranks: int) -> list[torch.Tensor]:
    """Returns the same parts in every process; sizes vary between calls, a few need two launches."""
    random_call = random.Random(call)
    dtype = random_call.choice((SIXTEEN, torch.float32))
    most = num_ranks * CHUNK_BYTES // dtype.itemsize
    size = ALIGNED * random_call.choice((1, 7, most // ALIGNED // 3, most // ALIGNED, most // ALIGNED + 1))
    seeds = torch.Generator().manual_seed(call)
    return [torch.randn(size, generator=seeds).to(dtype) for _ in range(num_ranks)]


def run_rank(rank: int, regions: list[torch.Tensor], told: Connection) -> None:
    """Reports the calls with wrong sums to the parent."""
    mine, size = exchange(rank, regions), len(regions)
    wrong = []
    for call in range(CALLS):
        parts = parts_of(call, size)
        if not torch.equal(two_shot_sum_of_ranks(parts[rank].clone(), mine), reference(parts)):
            wrong.append(call)
    told.send(wrong)


@pytest.mark.slow
@pytest.mark.skipif(ON_GPU, reason="of the interpreter; test_peer_memory_cuda.py has the same on GPUs")
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_concurrent_ranks_do_not_mix_calls(num_ranks: int) -> None:
    regions = [region.share_memory_() for region in memory(num_ranks)]
    context = multiprocessing.get_context("spawn")
    ends = [context.Pipe() for _ in range(num_ranks)]
    ranks = [
        context.Process(target=run_rank, args=(rank, regions, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(ends)
    ]
    for process in ranks:
        process.start()
    try:
        assert [mine.recv() for mine, _ in ends] == [[]] * num_ranks
    finally:
        for process in ranks:
            process.kill()
            process.join()
