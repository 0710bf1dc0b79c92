"""One-shot all-reduce over the GPUs of a host: each rank writes its part into the memory of every other one.

Data is written in words of 8 bytes, 4 of the part and 4 of the call's number, as in NCCL's LL protocol: a word arrives
as a whole, so no flag has to follow a fence, and a sum waits for a single pass over the link. It costs twice the bytes,
which pays for small sizes.

A program is a channel that counts its own calls. Words of even and odd calls are separate: a rank that is one call
ahead does not overwrite what another still reads, and it cannot be two ahead, because it would need the other's words
of the next call, which are written after all of the previous call was read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire.kernels.triton.pdl import launch_dependents, wait_for_inputs

BLOCK = 512  # words per program: 4 per thread, so that few rows are spread over several multiprocessors
WARPS = 4
DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, eq=False)
class RankMailbox:
    """Memory that ranks write to each other, for sums of at most `num_blocks` blocks."""

    rank: int
    num_blocks: int
    inboxes: torch.Tensor  # [num_ranks] int64, addresses of int64 [2, num_ranks, num_blocks * BLOCK], initially zero
    calls: torch.Tensor  # [num_blocks] int32, calls of this rank, initially zero

    @property
    def most_bytes(self) -> int:
        """Maximum bytes of a part."""
        return self.num_blocks * BLOCK * 4


def inbox_words(num_ranks: int, num_blocks: int) -> int:
    """Returns the number of 8-byte words of an inbox."""
    return 2 * num_ranks * num_blocks * BLOCK


@triton.jit
def _element(words, HIGH: tl.constexpr, DTYPE: tl.constexpr):
    """Extracts one of the two elements of a word."""
    half = (words >> 16) if HIGH else words
    return half.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _word(low, high, DTYPE: tl.constexpr):
    low = low.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
    return low | (high.to(DTYPE).to(tl.int16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _sum_of_ranks(
    x_ptr,
    residual_ptr,
    out_ptr,
    inboxes_ptr,
    calls_ptr,
    num_words,
    inbox_size,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Sends a block to all ranks, waits for theirs and adds them in rank order, into the residual if ADD."""
    block = tl.program_id(0)
    if PDL:
        launch_dependents()
        wait_for_inputs()
    before = tl.load(calls_ptr + block)
    call = tl.where(before == -1, 2, before + 1)  # 0 means never written; even and odd calls still alternate
    at = block * BLOCK + tl.arange(0, BLOCK)
    inside = at < num_words
    mine = tl.load(x_ptr + at, mask=inside, other=0)
    stamp = call.to(tl.int64) << 32
    turn = (call & 1).to(tl.int64) * NUM_RANKS
    for step in tl.static_range(1, NUM_RANKS):  # each rank starts with another peer
        inbox = tl.load(inboxes_ptr + (RANK + step) % NUM_RANKS).to(tl.pointer_type(tl.int64))
        words = stamp | (mine.to(tl.int64) & 0xFFFFFFFF)
        tl.store(inbox + (turn + RANK) * inbox_size + at, words, mask=inside, cache_modifier=".wt")
    own = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    low = tl.zeros([BLOCK], tl.float32)
    high = tl.zeros([BLOCK], tl.float32)
    for rank in tl.static_range(NUM_RANKS):
        words = mine
        if rank != RANK:
            source = own + (turn + rank) * inbox_size + at
            received = tl.load(source, mask=inside, other=0, volatile=True)
            while tl.max(tl.where(inside & ((received >> 32).to(tl.int32) != call), 1, 0), 0) > 0:
                received = tl.load(source, mask=inside, other=0, volatile=True)
            words = received.to(tl.int32)
        low += _element(words, False, DTYPE)
        high += _element(words, True, DTYPE)
    total = _word(low, high, DTYPE)
    if ADD:
        residual = tl.load(residual_ptr + at, mask=inside, other=0)
        low = _element(residual, False, DTYPE) + _element(total, False, DTYPE)
        high = _element(residual, True, DTYPE) + _element(total, True, DTYPE)
        total = _word(low, high, DTYPE)
    tl.store(out_ptr + at, total, mask=inside)
    tl.store(calls_ptr + block, call)


def sum_of_ranks_takes(x: torch.Tensor, mailbox: RankMailbox) -> bool:
    """Returns whether such a part is supported. The same on all ranks."""
    return x.dtype in DTYPES and x.numel() % 2 == 0 and 0 < x.numel() * 2 <= mailbox.most_bytes


def sum_of_ranks(
    x: torch.Tensor, mailbox: RankMailbox, residual: torch.Tensor | None = None, *, pdl: bool = False
) -> torch.Tensor:
    """Sums x over ranks as kernels/reference/rank_sums.py and returns the result, which replaces `x`, or is added to
    `residual` in place. All ranks call it in the same order. `pdl`: in a chain of kernels that wait for their inputs;
    loads of the next kernel overlap with waiting for the other ranks."""
    assert sum_of_ranks_takes(x, mailbox)
    out = x if residual is None else residual
    assert x.is_contiguous()
    assert out.is_contiguous()
    num_words = x.numel() // 2
    launch = {"launch_pdl": True} if pdl else {}
    _sum_of_ranks[(triton.cdiv(num_words, BLOCK),)](
        x.view(-1).view(torch.int32),
        None if residual is None else residual.view(-1).view(torch.int32),
        out.view(-1).view(torch.int32),
        mailbox.inboxes,
        mailbox.calls,
        num_words,
        mailbox.num_blocks * BLOCK,
        RANK=mailbox.rank,
        NUM_RANKS=mailbox.inboxes.size(0),
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        ADD=residual is not None,
        BLOCK=BLOCK,
        PDL=pdl,
        num_warps=WARPS,
        **launch,
    )
    return out
