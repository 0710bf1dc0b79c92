"""Common parts of attention kernels: locating a tile of keys and values in its blocks, and the softmax over tiles.

Softmax uses powers of two (scores are multiplied by log2 e), because the hardware has exp2, not exp. Positions of a
tile outside the sequence are loaded as zeros, because NaN there would spread through 0 * NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = 1.4426950408889634
MIN_DOT = 16  # smallest matrix side of tensor cores


@triton.jit
def find_blocks(table_ptr, start, end, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr):
    """Returns the block ids of positions `start` to `start + TILE`: one if no tile crosses blocks, else by position.

    Kernels fetch the ids of the next tile while they compute on this one: loaded in the same round as keys and values,
    they would leave one buffer where three are wanted (seen in the compiled code).
    """
    if BLOCK_SIZE % TILE == 0:
        return tl.load(table_ptr + start // BLOCK_SIZE, mask=start < end, other=0)
    else:
        positions = start + tl.arange(0, TILE)
        return tl.load(table_ptr + positions // BLOCK_SIZE, mask=positions < end, other=0)


@triton.jit
def first_seen(position, window, CHUNKED: tl.constexpr):
    """Returns the first position visible to a row at `position`; 0 for padding rows at -1.

    `CHUNKED`: positions from the last multiple of the window on are visible.
    """
    if CHUNKED:
        return tl.maximum(position, 0) // window * window
    else:
        return tl.maximum(position - window + 1, 0)


@triton.jit
def load_tile(
    cache_ptr,
    blocks,
    start,
    first,
    end,
    head,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
):
    """Loads [TILE, WIDTH] of one head, zeros outside of positions `first` to `end`.

    The cache is dense, [num_blocks, block_size, kv_heads, head_dim].
    """
    positions = start + tl.arange(0, TILE)
    at = tl.arange(0, WIDTH)
    places = (blocks.to(tl.int64) * BLOCK_SIZE + positions % BLOCK_SIZE) * KV_HEADS + head
    inside = ((positions >= first) & (positions < end))[:, None]
    if WIDTH != HEAD_DIM:
        inside = inside & (at < HEAD_DIM)[None, :]
    return tl.load(cache_ptr + places[:, None] * HEAD_DIM + at[None, :], mask=inside, other=0.0)


@triton.jit
def to_cache(x, dtype: tl.constexpr):
    """Converts x to the cache's dtype; clamps for 8 bits (kernels/reference/attention/kv_dtype.py)."""
    if dtype == tl.float8e4nv:
        x = tl.clamp(x.to(tl.float32), -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    return x.to(dtype)


@triton.jit
def meeting(q, cache_ptr):
    """Converts queries to the dtype of the products.

    float16 for an 8-bit cache, which converts to it in one instruction, but to bfloat16 in several.
    """
    if cache_ptr.dtype.element_ty == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)
    return q


@triton.jit
def soft_cap(scores, SOFTCAP: tl.constexpr):
    """Computes SOFTCAP * tanh(score / SOFTCAP) of scores in powers of two; 0: unchanged."""
    if SOFTCAP > 0:
        tanh = 1.0 - 2.0 / (tl.exp2(scores * (2.0 / SOFTCAP)) + 1.0)
        scores = tanh * (SOFTCAP * 1.4426950408889634)  # LOG2_E
    return scores


@triton.jit
def accumulate(scores, v, top, total, out, PRECISION: tl.constexpr):
    """Runs one round of the online softmax (arXiv 1805.02867): scores [rows, TILE], -inf where masked.

    top: largest score so far; total: sum of exp2(score - top); out [rows, WIDTH]: the same sum weighted by values.
    """
    new_top = tl.maximum(top, tl.max(scores, 1))
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)  # rows without a visible key so far
    weights = tl.exp2(scores - anchor[:, None])
    keep = tl.exp2(top - anchor)
    total = total * keep + tl.sum(weights, 1)
    out = tl.dot(weights.to(v.dtype), v, out * keep[:, None], input_precision=PRECISION)
    return new_top, total, out


@triton.jit
def merge(log, found, top, total, out):
    """Merges a complete part into the online softmax of `accumulate`, given its output and the logarithm of its
    weight."""
    new_top = tl.maximum(top, log)
    anchor = tl.where(new_top == float("-inf"), 0.0, new_top)
    keep, weight = tl.exp2(top - anchor), tl.exp2(log - anchor)
    return new_top, total * keep + weight, out * keep[:, None] + found * weight[:, None]


def padded_head_dim(head_dim: int) -> int:
    return max(triton.next_power_of_2(head_dim), MIN_DOT)


def tile_keys(keys: int, head_dim: int, element_bytes: int) -> int:
    """Returns the positions of a tile with the memory of `keys` positions of 128 16-bit elements, at most `keys`."""
    return max(MIN_DOT, min(keys, keys * 256 // (padded_head_dim(head_dim) * element_bytes)))


def dot_precision(element_bytes: int) -> str:
    """Selects the precision of products: float32 models need float32, not Triton's default TF32."""
    return "ieee" if element_bytes == 4 else "tf32"
