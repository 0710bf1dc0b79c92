"""Randomness without state: the noise of a token is a function of (seed, position, token id) and nothing else.

Everything is arithmetic on unsigned 32-bit words, so that every device and language computes the same words:

    mix(h)    = murmur3's finalizer: h ^= h >> 16; h *= 0x85EBCA6B; h ^= h >> 13; h *= 0xC2B2AE35; h ^= h >> 16
    lo, hi    = low and high word of the seed (two's complement)
    key0      = mix(mix(mix(lo ^ 0x9E3779B9) ^ hi) ^ position)
    key1      = mix(mix(mix(hi ^ 0x7F4A7C15) ^ lo) ^ position)
    word      = mix(mix(token * 0x9E3779B1 + key0) ^ key1)
    v         = min(float32(word) * 2^-32 + 2^-33, 1 - 2^-24)        uniform in (0, 1), fine near 0
    noise     = -log(-log1p(-v))                                    Gumbel(0, 1), always finite

log1p keeps all 32 bits where they matter: large noise comes from small v, so that rare tokens keep their share.
"""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
V_MAX = 1 - 2.0**-24


def gumbel_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Returns noise float32 [num_rows, vocab_size] for `seeds` int64 [num_rows] and `positions` int32 [num_rows]."""
    return noise_of(*row_keys(seeds, positions), torch.arange(vocab_size, device=seeds.device))


def noise_of(key0: torch.Tensor, key1: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Returns the noise of selected tokens.

    `token_ids`: int64 [num_tokens] or [num_rows, num_tokens]; keys from row_keys().
    """
    tokens = token_ids * 0x9E3779B1  # may wrap at 64 bits; the low word stays correct
    words = _mix(_mix((tokens + key0.unsqueeze(1)) & WORD) ^ key1.unsqueeze(1))
    v = (words.float() * 2.0**-32 + 2.0**-33).clamp_(max=V_MAX)
    return v.neg_().log1p_().neg_().log_().neg_()


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns key0 and key1 of each row, words in int64."""
    low, high, positions = seeds & WORD, (seeds >> 32) & WORD, positions.long()
    key0 = _mix(_mix(_mix(low ^ 0x9E3779B9) ^ high) ^ positions)
    key1 = _mix(_mix(_mix(high ^ 0x7F4A7C15) ^ low) ^ positions)
    return key0, key1


def _mix(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & WORD
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & WORD
    return h ^ (h >> 16)
