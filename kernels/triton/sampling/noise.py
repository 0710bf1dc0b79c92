"""Gumbel noise as a function of (seed, position, token), as defined in kernels/reference/sampling/noise.py."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(h):
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@triton.jit
def row_keys(seed, position):
    """Returns the two words of a row: `seed` int64, `position` int32, both scalars."""
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    at = position.to(tl.uint32)
    key0 = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ at)
    key1 = _mix(_mix(_mix(high ^ 0x7F4A7C15) ^ low) ^ at)
    return key0, key1


@triton.jit
def _uniform(key0, key1, tokens):
    """Computes v of kernels/reference/sampling/noise.py."""
    word = _mix(_mix(tokens.to(tl.uint32) * 0x9E3779B1 + key0) ^ key1)
    return tl.minimum(word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10, 0.99999994)


@triton.jit
def gumbel_noise(key0, key1, tokens):
    """Returns float32 noise of the shape of `tokens` (int32)."""
    v = _uniform(key0, key1, tokens)
    # -log1p(-v): the logarithm of the rounded 1 - v, corrected by the rounding error (Kahan)
    rest = 1.0 - v
    lost = tl.where(rest == 1.0, 1.0, 1.0 - rest)
    exponential = tl.where(rest == 1.0, v, -tl.log(rest) * (v / lost))
    return -tl.log(exponential)


@triton.jit
def noise_bound(key0, key1, tokens):
    """Returns an upper bound of gumbel_noise without logarithms, at most 0.06 larger where that is large.

    -log(-log1p(-v)) <= -log(v), and log2(v) is at least the bits of a float read as a number: its exponent and, as a
    fraction, its mantissa (log2(1 + m) >= m).
    """
    bits = _uniform(key0, key1, tokens).to(tl.int32, bitcast=True)
    return 88.02969193111305 + 1e-4 - bits.to(tl.float32) * 8.262958294867817e-08  # ln 2 * (127 - bits / 2 ** 23)
