"""Keys and values in a cache of fewer bits than the model's: float8_e4m3fn, without a scale.

3 bits of mantissa: a stored value is off by 2.6 % (root mean square over a normal distribution), whatever its size from
2^-6 to 448, the largest there is. Larger ones are cut, not lost: the cast alone would make NaN of them.
"""

from __future__ import annotations

import torch

FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def to_cache(x: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
    """x in the cache's dtype."""
    return x.float().clamp(-FP8_MAX, FP8_MAX).to(FP8) if cache.dtype is FP8 else x.to(cache.dtype)


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """The same memory for functions that know no 8-bit floats, such as gathering and scattering; others as they are."""
    return x.view(torch.uint8) if x.dtype is FP8 else x


def take_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """cache[blocks], in its dtype."""
    return as_bytes(cache).index_select(0, blocks).view(cache.dtype)
