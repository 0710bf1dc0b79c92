"""Masks logits by grammar bitmasks: only banned tokens are written, and no logit is read.

Masks may be in pinned host memory, which is read once, word by word, without a prior copy.
"""

from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl

from quire.kernels.triton.precompile.shapes import ROWS, Calls, ModelShape, floats, ints, longs

PART = 128  # words per program
BITS = 32


@triton.jit(do_not_specialize=["num_words", "first", "first_word"])
def _mask_logits(
    logits_ptr,
    rows_ptr,
    masks_ptr,
    places_ptr,
    size,
    row_stride,
    num_words,
    first,
    first_word,
    PART: tl.constexpr,
    BITS: tl.constexpr,
):
    """Writes -inf to the banned tokens of PART words of a row's mask."""
    part, index = tl.program_id(0), tl.program_id(1)
    row = index.to(tl.int64)
    if rows_ptr is not None:
        row = tl.load(rows_ptr + index)
    place = index.to(tl.int64)
    if places_ptr is not None:
        place = tl.load(places_ptr + index)
    at = first_word + part * PART + tl.arange(0, PART)
    words = tl.load(masks_ptr + place * num_words + at, mask=at < num_words, other=-1)
    bits = tl.arange(0, BITS)
    banned = ((words[:, None] >> bits[None, :]) & 1) == 0
    tokens = at[:, None] * BITS + bits[None, :] - first
    banned_logits = tl.full([PART, BITS], float("-inf"), logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + tokens, banned_logits, mask=banned & (tokens >= 0) & (tokens < size))


def mask_logits(
    logits: torch.Tensor,
    rows: torch.Tensor | None,
    masks: torch.Tensor,
    places: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """Sets logits of tokens whose bit in `masks` is 0 to minus infinity, in place; tokens after the masks' last bit
    stay. Masks may be in pinned host memory."""
    size, num_words = logits.size(1), masks.size(1)
    first_word = first // BITS
    assert logits.stride(1) == 1
    assert masks.is_contiguous()
    read = min(triton.cdiv(first + size, BITS), num_words) - first_word
    if read <= 0:
        return
    grid = (triton.cdiv(read, PART), masks.size(0) if places is None else places.size(0))
    _mask_logits[grid](
        logits, rows, masks, places, size, logits.stride(0), num_words, first, first_word, PART=PART, BITS=BITS
    )


def precompile_calls(shape: ModelShape) -> Calls:
    """Yields the kernel's calls for both dtypes of logits and the kinds of indices."""
    full, half = floats(ROWS, shape.vocab_size), shape.empty(ROWS, shape.vocab_size)
    words, ids = ints(ROWS, triton.cdiv(shape.vocab_size, BITS)), longs(ROWS)
    for chosen in (None, ids):
        for masked, places in ((full, None), (full, ids), (half, ids)):
            yield partial(mask_logits, masked, chosen, words, places)
