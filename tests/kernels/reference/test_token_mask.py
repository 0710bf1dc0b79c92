from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import needs_library

VERSIONS = [
    pytest.param(reference.mask_logits, id="reference"),
    pytest.param(getattr(cpu, "mask_logits", None), id="cpu", marks=pytest.mark.skipif(**needs_library)),
]


def packed(allowed: np.ndarray) -> torch.Tensor:
    """Packs bool [num_masks, vocab_size] into words; bits after the vocabulary are set, which must not matter."""
    num_words = -(-allowed.shape[1] // 32)
    padded = np.ones((len(allowed), num_words * 32), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed
    return torch.from_numpy(np.packbits(padded, axis=1, bitorder="little").view(np.int32))


def scattered(masks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the masks at other indices among more, and those indices."""
    places = torch.arange(len(masks)).flip(0) * 2 + 1
    among = torch.full((2 * len(masks) + 1, masks.size(1)), 0x5555, dtype=torch.int32)
    among[places] = masks
    return among, places


@pytest.mark.parametrize("mask_logits", VERSIONS)
@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 1000, 4096, 32003])
@pytest.mark.parametrize("rows", [None, [0], [4, 1], [5, 3, 2, 0, 1, 4]])
def test_only_tokens_without_a_bit_are_banned(mask_logits, vocab_size, rows):
    rng = np.random.default_rng(vocab_size)
    logits = torch.randn(6, vocab_size)
    masked = range(6) if rows is None else rows
    allowed = rng.random((len(masked), vocab_size)) < rng.choice([0.02, 0.5, 0.98], (len(masked), 1))
    allowed[0, : 40 * (vocab_size > 80)] = True  # whole words of allowed and of banned tokens
    allowed[-1, : 40 * (vocab_size > 80)] = False
    want = logits.clone()
    for row, mask in zip(masked, allowed, strict=True):
        want[row, torch.from_numpy(~mask)] = float("-inf")
    masks, chosen = packed(allowed), None if rows is None else torch.tensor(rows)
    kept = logits.clone()
    mask_logits(logits, chosen, masks)
    assert torch.equal(logits, want)
    mask_logits(kept, chosen, *scattered(masks))
    assert torch.equal(kept, want)


@pytest.mark.parametrize("mask_logits", VERSIONS)
@pytest.mark.parametrize("size", [500, 512, 333, 31])
def test_parts_of_the_vocabulary_are_masked_as_the_whole_is(mask_logits, size):
    """The last part may have padding columns, to which the last bits of a mask do not apply."""
    rng = np.random.default_rng(size)
    logits, vocab_size = torch.randn(4, 1000), 1000
    masks, places = scattered(packed(rng.random((2, vocab_size)) < 0.5))
    rows, want = torch.tensor([3, 0]), logits.clone()
    mask_logits(want, rows, masks, places)
    for first in range(0, vocab_size, size):
        part = torch.nn.functional.pad(logits[:, first : first + size], (0, max(0, first + size - vocab_size)))
        mask_logits(part, rows, masks, places, first)
        here = min(size, vocab_size - first)
        assert torch.equal(part[:, :here], want[:, first : first + here])
