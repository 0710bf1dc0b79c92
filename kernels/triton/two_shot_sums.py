"""Two-shot all-reduce over the GPUs of a host in one kernel: reduce-scatter, then all-gather.

Each byte is sent about twice, for any number of ranks: every rank sums one chunk of all parts, then writes the sum to
the others. As in the one-shot kernel (rank_sums.py) ranks write to each other's memory and read only their own. They
wait for 4-byte flags after the data, released and acquired in system scope, which contain the call's number, so that
flags of different calls cannot be confused.

A program is a channel: it has the same blocks of every chunk in every call, waits only for the program of its number on
the other ranks, and counts its calls. Nothing is double-buffered: a rank's flag of a call implies that it has finished
the previous one, and only then the others overwrite what it has read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

BLOCK_BYTES = 32 << 10  # bytes per program and step: 4 loads of 16 bytes in flight per thread
WARPS = 16
MOST_PROGRAMS = 128
ALIGNED = 16  # elements: chunks start at vector boundaries
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@dataclass(frozen=True, eq=False)
class SumExchange:
    """Memory that ranks write to each other, for sums of any size, `most_bytes` at a time."""

    rank: int
    chunk_bytes: int  # bytes per rank to be summed, a multiple of BLOCK_BYTES
    num_programs: int  # maximum; the same in every call
    regions: torch.Tensor  # [num_ranks] int64, addresses of region_bytes(), initially zero
    calls: torch.Tensor  # [num_programs] int32, calls of this rank, initially zero

    @property
    def num_ranks(self) -> int:
        return self.regions.size(0)

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a part in one launch."""
        return self.num_ranks * self.chunk_bytes


def flag_bytes(num_ranks: int) -> int:
    """Returns the bytes of flags at the start of a region: two for each other rank and program."""
    return 2 * (num_ranks - 1) * MOST_PROGRAMS * 4


def region_bytes(num_ranks: int, chunk_bytes: int) -> int:
    """Returns the bytes of a region: flags, the other ranks' parts to be summed, and the other ranks' sums."""
    return flag_bytes(num_ranks) + 2 * (num_ranks - 1) * chunk_bytes


@triton.jit
def _chunk(regions_ptr, rank, slot, chunk_bytes, DTYPE: tl.constexpr, NUM_RANKS: tl.constexpr, FLAGS: tl.constexpr):
    """Returns the address of a chunk in a rank's memory."""
    region = tl.multiple_of(tl.load(regions_ptr + rank).to(tl.pointer_type(tl.int8)), 16)
    place = region + (2 * (NUM_RANKS - 1) * FLAGS * 4 + slot * chunk_bytes)
    return place.to(tl.pointer_type(DTYPE), bitcast=True)


@triton.jit
def _meet(
    regions_ptr,
    program,
    call,
    SHOT: tl.constexpr,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Waits until the peers' programs have written, after publishing that this one has."""
    tl.debug_barrier()
    for step in tl.static_range(1, NUM_RANKS):
        other = (RANK + step) % NUM_RANKS
        flags = tl.load(regions_ptr + other).to(tl.pointer_type(tl.int32))
        place = (SHOT * (NUM_RANKS - 1) + NUM_RANKS - step - 1) * FLAGS + program
        tl.atomic_xchg(flags + place, call, sem="release", scope="sys")
    own = tl.load(regions_ptr + RANK).to(tl.pointer_type(tl.int32))
    for step in tl.static_range(1, NUM_RANKS):
        flag = own + (SHOT * (NUM_RANKS - 1) + step - 1) * FLAGS + program
        seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
        while seen != call:
            seen = tl.atomic_add(flag, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _sum_in_two_shots(
    x_ptr,
    residual_ptr,
    out_ptr,
    regions_ptr,
    calls_ptr,
    num_elements,
    chunk,
    chunk_bytes,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    FLAGS: tl.constexpr,
):
    """Sums this rank's chunk of all parts, writes the sum to the others, and stores their chunks."""
    program = tl.program_id(0)
    programs = tl.num_programs(0)
    dtype = x_ptr.dtype.element_ty
    before = tl.load(calls_ptr + program)
    call = tl.where(before == -1, 1, before + 1)  # 0 means never written
    for step in tl.static_range(1, NUM_RANKS):  # each rank starts with another peer
        other = (RANK + step) % NUM_RANKS
        inbox = _chunk(regions_ptr, other, NUM_RANKS - step - 1, chunk_bytes, dtype, NUM_RANKS, FLAGS)
        size = tl.minimum(chunk, num_elements - other * chunk)
        for block in tl.range(program, tl.cdiv(size, BLOCK), programs):
            at = block * BLOCK + tl.arange(0, BLOCK)
            tl.store(inbox + at, tl.load(x_ptr + other * chunk + at, mask=at < size), mask=at < size)
    _meet(regions_ptr, program, call, 0, RANK, NUM_RANKS, FLAGS)
    size = tl.minimum(chunk, num_elements - RANK * chunk)
    for block in tl.range(program, tl.cdiv(size, BLOCK), programs):
        at = block * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        total = tl.zeros([BLOCK], tl.float32)
        for rank in tl.static_range(NUM_RANKS):
            if rank == RANK:
                part = tl.load(x_ptr + RANK * chunk + at, mask=inside, other=0)
            else:
                slot = (rank - RANK + NUM_RANKS) % NUM_RANKS - 1
                inbox = _chunk(regions_ptr, RANK, slot, chunk_bytes, dtype, NUM_RANKS, FLAGS)
                part = tl.load(inbox + at, mask=inside, other=0, cache_modifier=".cg")
            total += part.to(tl.float32)
        rounded = total.to(dtype)
        for step in tl.static_range(1, NUM_RANKS):
            other = (RANK + step) % NUM_RANKS
            sums = _chunk(regions_ptr, other, 2 * NUM_RANKS - step - 2, chunk_bytes, dtype, NUM_RANKS, FLAGS)
            tl.store(sums + at, rounded, mask=inside)
        if ADD:
            residual = tl.load(residual_ptr + RANK * chunk + at, mask=inside, other=0)
            rounded = (residual.to(tl.float32) + rounded.to(tl.float32)).to(dtype)
        tl.store(out_ptr + RANK * chunk + at, rounded, mask=inside)
    _meet(regions_ptr, program, call, 1, RANK, NUM_RANKS, FLAGS)
    for step in tl.static_range(1, NUM_RANKS):
        other = (RANK + step) % NUM_RANKS
        sums = _chunk(regions_ptr, RANK, NUM_RANKS + step - 2, chunk_bytes, dtype, NUM_RANKS, FLAGS)
        size = tl.minimum(chunk, num_elements - other * chunk)
        for block in tl.range(program, tl.cdiv(size, BLOCK), programs):
            at = block * BLOCK + tl.arange(0, BLOCK)
            inside = at < size
            total = tl.load(sums + at, mask=inside, other=0, cache_modifier=".cg")
            if ADD:
                residual = tl.load(residual_ptr + other * chunk + at, mask=inside, other=0)
                total = (residual.to(tl.float32) + total.to(tl.float32)).to(dtype)
            tl.store(out_ptr + other * chunk + at, total, mask=inside)
    tl.store(calls_ptr + program, call)


def two_shot_sum_takes(x: torch.Tensor) -> bool:
    """Returns whether such a part is supported. The same on all ranks."""
    return x.dtype in DTYPES and x.numel() > 0 and x.numel() % ALIGNED == 0


def two_shot_sum_of_ranks(
    x: torch.Tensor, exchange: SumExchange, residual: torch.Tensor | None = None, *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """Sums x over ranks as kernels/reference/rank_sums.py and returns the result: added to `residual` in place, or in
    `out`, or in place of `x`. All ranks call it with their parts in the same order."""
    assert two_shot_sum_takes(x)
    target = residual if residual is not None else x if out is None else out
    assert x.is_contiguous()
    assert target.is_contiguous()
    assert target.numel() == x.numel()
    most = exchange.most_bytes // x.element_size()
    flat, into = x.view(-1), target.view(-1)
    for first in range(0, x.numel(), most):
        _launch(flat[first : first + most], into[first : first + most], exchange, adds=residual is not None)
    return target


def _launch(x: torch.Tensor, out: torch.Tensor, exchange: SumExchange, *, adds: bool) -> None:
    """Launches the sum of one piece that fits into the exchange's memory; `adds`: `out` is a residual to add to."""
    block = BLOCK_BYTES // x.element_size()
    chunk = triton.cdiv(triton.cdiv(x.numel(), exchange.num_ranks), ALIGNED) * ALIGNED
    grid = (min(exchange.num_programs, triton.cdiv(chunk, block)),)
    _sum_in_two_shots[grid](
        x,
        out if adds else None,
        out,
        exchange.regions,
        exchange.calls,
        x.numel(),
        chunk,
        exchange.chunk_bytes,
        RANK=exchange.rank,
        NUM_RANKS=exchange.num_ranks,
        ADD=adds,
        BLOCK=block,
        FLAGS=MOST_PROGRAMS,
        num_warps=WARPS,
    )
