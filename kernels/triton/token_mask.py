"""Banning what a grammar does not allow: only what is banned is written, and no logit is read."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

PART = 4096  # tokens a program
BITS = 32


@triton.jit(do_not_specialize=["num_words"])
def _mask_logits(logits_ptr, rows_ptr, masks_ptr, vocab_size, row_stride, num_words, PART: tl.constexpr):
    part, index = tl.program_id(0), tl.program_id(1)
    tokens = part * PART + tl.arange(0, PART)
    inside = tokens < vocab_size
    row = index.to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    words = tl.load(masks_ptr + index.to(tl.int64) * num_words + tokens // 32, mask=inside, other=-1)
    banned = ((words >> (tokens % 32)) & 1) == 0
    target = logits_ptr + row * row_stride + tokens
    tl.store(target, tl.full([PART], float("-inf"), tl.float32), mask=inside & banned)


def mask_logits(logits: torch.Tensor, rows: torch.Tensor | None, masks: torch.Tensor) -> None:
    vocab_size, num_words = logits.size(1), masks.size(1)
    assert logits.dtype is torch.float32
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    assert num_words == -(-vocab_size // BITS)
    grid = (triton.cdiv(vocab_size, PART), masks.size(0))
    _mask_logits[grid](logits, rows, masks, vocab_size, logits.stride(0), num_words, PART=PART)
