from __future__ import annotations

import numpy as np
import pytest
import torch

from quire.kernels import reference
from quire.kernels.triton.sampling.token_mask import mask_logits
from tests.kernels.reference.test_token_mask import packed, scattered


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [1, 33, 4096, 9000])
@pytest.mark.parametrize("rows", [None, [4, 1], [5, 3, 2, 0, 1, 4]])
def test_only_tokens_without_a_bit_are_banned(device, vocab_size, rows, dtype):
    rng = np.random.default_rng(vocab_size)
    logits = torch.randn(6, vocab_size, device=device).to(dtype)
    masks = packed(rng.random((6 if rows is None else len(rows), vocab_size)) < 0.5)
    chosen = None if rows is None else torch.tensor(rows, device=device)
    want, kept = logits.clone(), logits.clone()
    reference.mask_logits(want, chosen, masks.to(device))
    mask_logits(logits, chosen, masks.to(device))
    assert torch.equal(logits, want)
    among, places = scattered(masks)
    mask_logits(kept, chosen, among.to(device), places.to(device))
    assert torch.equal(kept, want)


@pytest.mark.parametrize(("first", "size"), [(0, 4500), (4500, 4500), (33, 1), (8990, 20), (9024, 30)])
def test_masks_of_the_whole_for_a_part(device, first, size):
    """Columns behind the last bit of a mask are padding."""
    masks, places = scattered(packed(np.random.default_rng(first).random((6, 9000)) < 0.5))
    got, want = (torch.zeros(6, size, device=device) for _ in range(2))
    mask_logits(got, None, masks.to(device), places.to(device), first)
    reference.mask_logits(want, None, masks.to(device), places.to(device), first)
    assert torch.equal(got, want)


@pytest.mark.gpu
def test_masks_in_pinned_memory():
    rng = np.random.default_rng(3)
    logits = torch.randn(6, 9000, device="cuda")
    masks, places = scattered(packed(rng.random((6, 9000)) < 0.5))
    want = logits.clone()
    reference.mask_logits(want, None, masks, places.cuda())
    mask_logits(logits, None, masks.pin_memory(), places.cuda())
    assert torch.equal(logits, want)


def test_rows_of_a_wider_tensor(device):
    wide = torch.zeros(3, 100, device=device)
    mask_logits(wide[:, :40], None, torch.zeros(3, 2, dtype=torch.int32, device=device))
    assert torch.isneginf(wide[:, :40]).all()
    assert (wide[:, 40:] == 0).all()
