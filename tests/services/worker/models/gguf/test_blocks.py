"""GGUF blocks are decoded according to llama.cpp's layout, compared element by element."""

from __future__ import annotations

import struct
from collections.abc import Callable

import pytest
import torch

from quire.services.worker.models.gguf.blocks import DECODE
from quire.shared.gguf.kinds import KINDS, ElementKind
from tests import gguf_files

Block = bytes
NUM_BLOCKS = 7


def half(block: Block, at: int) -> float:
    return float(struct.unpack_from("<e", block, at)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def nibble(block: Block, at: int, element: int) -> int:
    """Reads one of 32 elements in 16 bytes."""
    byte = block[at + element % 16]
    return byte >> 4 if element >= 16 else byte & 15


def fifth(block: Block, at: int, element: int) -> int:
    return (int.from_bytes(block[at : at + 4], "little") >> element & 1) << 4


def six_bits(block: Block, group: int) -> tuple[int, int]:
    """Reads scale and minimum of a group from the 12 bytes after the fourth."""
    packed = block[4:16]
    if group < 4:
        return packed[group] & 63, packed[group + 4] & 63
    low, above = packed[group + 4], (packed[group - 4] >> 6, packed[group] >> 6)
    return low & 15 | above[0] << 4, low >> 4 | above[1] << 4


def by_group(block: Block, element: int, code: int) -> float:
    scale, minimum = six_bits(block, element // 32)
    return half(block, 0) * scale * code - half(block, 2) * minimum


def k_nibble(block: Block, at: int, element: int) -> int:
    group, place = divmod(element, 32)
    byte = block[at + group // 2 * 32 + place]
    return byte >> 4 if group % 2 else byte & 15


def q5_k(block: Block, element: int) -> float:
    group, place = divmod(element, 32)
    return by_group(block, element, k_nibble(block, 48, element) | (block[16 + place] >> group & 1) << 4)


def q6_k(block: Block, element: int) -> float:
    part, inside = divmod(element, 128)
    quarter, place = divmod(inside, 32)
    byte = block[part * 64 + quarter % 2 * 32 + place]
    low = byte >> 4 if quarter >= 2 else byte & 15
    high = block[128 + part * 32 + place] >> 2 * quarter & 3
    return half(block, 208) * signed(block[192 + element // 16]) * ((low | high << 4) - 32)


SCALAR: dict[str, Callable[[Block, int], float]] = {
    "Q4_0": lambda b, i: half(b, 0) * (nibble(b, 2, i) - 8),
    "Q4_1": lambda b, i: half(b, 0) * nibble(b, 4, i) + half(b, 2),
    "Q5_0": lambda b, i: half(b, 0) * ((nibble(b, 6, i) | fifth(b, 2, i)) - 16),
    "Q5_1": lambda b, i: half(b, 0) * (nibble(b, 8, i) | fifth(b, 4, i)) + half(b, 2),
    "Q8_0": lambda b, i: half(b, 0) * signed(b[2 + i]),
    "Q4_K": lambda b, i: by_group(b, i, k_nibble(b, 16, i)),
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}


QUANTIZED = [kind for kind in KINDS.values() if kind.is_quantized]


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_are_decoded_as_their_layout_says(kind: ElementKind) -> None:
    blocks = gguf_files.random_blocks(kind.name, NUM_BLOCKS * kind.block_size, seed=3)
    decoded = DECODE[kind.name](torch.from_numpy(blocks))
    scalar = [[SCALAR[kind.name](block.tobytes(), i) for i in range(kind.block_size)] for block in blocks]
    torch.testing.assert_close(decoded, torch.tensor(scalar), rtol=1e-6, atol=1e-6)
    assert decoded.std() > 0


@pytest.mark.parametrize("kind", QUANTIZED, ids=lambda kind: kind.name)
def test_blocks_are_decoded_as_the_package_gguf_does(kind: ElementKind) -> None:
    quants = pytest.importorskip("gguf.quants")
    blocks = gguf_files.random_blocks(kind.name, NUM_BLOCKS * kind.block_size, seed=3)
    number = next(number for number, one in KINDS.items() if one is kind)
    reference = quants.dequantize(blocks.copy(), quants.GGMLQuantizationType(number))
    assert torch.equal(DECODE[kind.name](torch.from_numpy(blocks)), torch.from_numpy(reference))
