"""All-reduce over the GPUs of a host as in rank_sums.py, fused with RMS norm.

A program has one row, which covers several of that module's channels: the two kernels alternate on one mailbox. The
work between two layers is then one launch and one pass through memory instead of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from quire.kernels.triton.rank_sums import BLOCK, RankMailbox, _element, _word, sum_of_ranks_takes

MOST_WORDS = 4096  # maximum words of a row, held by one program


@triton.jit
def _normed_sum_of_ranks(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    inboxes_ptr,
    calls_ptr,
    eps,
    inbox_size,
    RANK: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    DTYPE: tl.constexpr,
    WORDS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sends a row to all ranks, adds their rows in rank order to the residual, and normalizes it."""
    column = tl.arange(0, WIDTH)
    inside = column < WORDS
    at = tl.program_id(0) * WORDS + column
    before = tl.load(calls_ptr + at // BLOCK, mask=inside, other=0)
    call = tl.where(before == -1, 2, before + 1)  # as in rank_sums.py
    mine = tl.load(x_ptr + at, mask=inside, other=0)
    stamp = call.to(tl.int64) << 32
    turn = (call & 1).to(tl.int64) * NUM_RANKS
    for step in tl.static_range(1, NUM_RANKS):
        inbox = tl.load(inboxes_ptr + (RANK + step) % NUM_RANKS).to(tl.pointer_type(tl.int64))
        words = stamp | (mine.to(tl.int64) & 0xFFFFFFFF)
        tl.store(inbox + (turn + RANK) * inbox_size + at, words, mask=inside, cache_modifier=".wt")
    own = tl.load(inboxes_ptr + RANK).to(tl.pointer_type(tl.int64))
    residual = tl.load(residual_ptr + at, mask=inside, other=0)
    weight = tl.load(weight_ptr + column, mask=inside, other=0)
    low = tl.zeros([WIDTH], tl.float32)
    high = tl.zeros([WIDTH], tl.float32)
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
    low = _element(residual, False, DTYPE) + _element(total, False, DTYPE)
    high = _element(residual, True, DTYPE) + _element(total, True, DTYPE)
    total = _word(low, high, DTYPE)
    tl.store(residual_ptr + at, total, mask=inside)
    low = _element(total, False, DTYPE)
    high = _element(total, True, DTYPE)
    scale = tl.rsqrt(tl.sum(low * low + high * high, 0) / (2 * WORDS) + eps)
    normed = _word(low * scale * _element(weight, False, DTYPE), high * scale * _element(weight, True, DTYPE), DTYPE)
    tl.store(out_ptr + at, normed, mask=inside)
    tl.store(calls_ptr + at // BLOCK, call, mask=inside & (column % BLOCK == 0))  # after the barriers of the sum


def normed_sum_takes(x: torch.Tensor, weight: torch.Tensor, mailbox: RankMailbox) -> bool:
    """Returns whether rows of this shape are supported, i.e. have channels of their own. The same on all ranks."""
    words = x.size(-1) // 2
    return sum_of_ranks_takes(x, mailbox) and words % BLOCK == 0 and words <= MOST_WORDS and weight.dtype == x.dtype


def normed_sum_of_ranks(
    x: torch.Tensor, mailbox: RankMailbox, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Adds the sum over ranks to the residual in place, as sum_of_ranks(), and returns its RMS norm, [num_rows, size].

    All ranks call it with their parts in the same order of calls.
    """
    assert normed_sum_takes(x, weight, mailbox)
    assert x.is_contiguous()
    assert residual.is_contiguous()
    words = x.size(-1) // 2
    width = triton.next_power_of_2(words)
    out = torch.empty_like(x)
    _normed_sum_of_ranks[(x.numel() // 2 // words,)](
        *(tensor.view(-1).view(torch.int32) for tensor in (x, residual, weight, out)),
        mailbox.inboxes,
        mailbox.calls,
        eps,
        mailbox.num_blocks * BLOCK,
        RANK=mailbox.rank,
        NUM_RANKS=mailbox.inboxes.size(0),
        DTYPE=tl.bfloat16 if x.dtype == torch.bfloat16 else tl.float16,
        WORDS=words,
        WIDTH=width,
        BLOCK=BLOCK,
        num_warps=min(max(width // 256, 4), 16),
    )
    return out
