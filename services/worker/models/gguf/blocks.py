"""Dequantization of GGUF blocks.

A block is a run of consecutive elements of a row that share a scale; the K types have blocks of 256 in groups with
scales of their own. Each function maps uint8 [blocks, block_bytes] to float32 [blocks, block_size].
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Decode = Callable[[Tensor], Tensor]

NIBBLE = 0x0F
SIX_BITS = 0x3F


def q8_0(blocks: Tensor) -> Tensor:
    """Dequantizes Q8_0: scale, 32 int8."""
    return blocks[:, 2:].view(torch.int8).float() * _half(blocks, 0)


def q4_0(blocks: Tensor) -> Tensor:
    """Dequantizes Q4_0: scale, 32 nibbles offset by 8."""
    return (_halves(blocks[:, 2:]).float() - 8) * _half(blocks, 0)


def q4_1(blocks: Tensor) -> Tensor:
    """Dequantizes Q4_1: scale, minimum, 32 nibbles."""
    return _halves(blocks[:, 4:]).float() * _half(blocks, 0) + _half(blocks, 2)


def q5_0(blocks: Tensor) -> Tensor:
    """Dequantizes Q5_0: scale, 32 fifth bits, 32 nibbles; offset by 16."""
    return (_fives(blocks[:, 2:6], blocks[:, 6:]).float() - 16) * _half(blocks, 0)


def q5_1(blocks: Tensor) -> Tensor:
    """Dequantizes Q5_1: scale, minimum, 32 fifth bits, 32 nibbles."""
    return _fives(blocks[:, 4:8], blocks[:, 8:]).float() * _half(blocks, 0) + _half(blocks, 2)


def q4_k(blocks: Tensor) -> Tensor:
    """Dequantizes Q4_K: scale of scales, scale of minima, eight of both in 6 bits, 8 x 32 nibbles."""
    codes = _nibbles(blocks[:, 16:].reshape(-1, 4, 32))
    return _scaled_by_eight(codes, blocks)


def q5_k(blocks: Tensor) -> Tensor:
    """Dequantizes Q5_K: as q4_k, with 32 bytes of fifth bits before the nibbles (bit g of byte i: element i of group
    g)."""
    groups = torch.arange(8, dtype=torch.uint8).view(1, 8, 1)
    fifth = (blocks[:, None, 16:48] >> groups & 1) << 4
    return _scaled_by_eight(_nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | fifth, blocks)


def q6_k(blocks: Tensor) -> Tensor:
    """Dequantizes Q6_K: 128 bytes of low nibbles, 64 of high bit pairs, 16 int8 scales, scale of scales; offset by
    32."""
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8).view(1, 1, 4, 1)
    high = blocks[:, 128:192].reshape(-1, 2, 1, 32) >> shifts & 3
    codes = (low | high << 4).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].view(torch.int8).float() * _half(blocks, 208)
    return (codes * scales.unsqueeze(-1)).view(-1, 256)


def _scaled_by_eight(codes: Tensor, blocks: Tensor) -> Tensor:
    """Scales codes [blocks, 8, 32] by the 6-bit scales and minima of their groups."""
    packed = blocks[:, 4:16]
    first, middle, last = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([first & SIX_BITS, last & NIBBLE | first >> 6 << 4], 1).float() * _half(blocks, 0)
    minima = torch.cat([middle & SIX_BITS, last >> 4 | middle >> 6 << 4], 1).float() * _half(blocks, 2)
    return (codes.float() * scales.unsqueeze(-1) - minima.unsqueeze(-1)).view(-1, 256)


def _half(blocks: Tensor, at: int) -> Tensor:
    """Reads the float16 at a byte offset of each block: [blocks, 1]."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _halves(packed: Tensor) -> Tensor:
    """Unpacks [..., n] bytes to [..., 2n]: all low nibbles, then all high ones."""
    return torch.cat([packed & NIBBLE, packed >> 4], -1)


def _nibbles(packed: Tensor) -> Tensor:
    """Unpacks [blocks, runs, n] to [blocks, 2 * runs, n]: for each run the low nibbles first."""
    return torch.stack([packed & NIBBLE, packed >> 4], 2).flatten(1, 2)


def _fives(fifth: Tensor, packed: Tensor) -> Tensor:
    """Combines nibbles with their fifth bits; bit i of 32 belongs to element i."""
    bits = fifth.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return _halves(packed) | bits.flatten(1) << 4


DECODE: dict[str, Decode] = {
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q8_0": q8_0,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
