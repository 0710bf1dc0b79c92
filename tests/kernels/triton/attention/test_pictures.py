"""Tokens of a picture see each other; all others see what is before them."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.triton.attention.chunk_attention import chunk_attention
from tests.kernels.cpu.paged import picture_ends
from tests.kernels.cpu.test_pictures import LENS, PICTURES, ROWS
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.paged import Case

SHAPES = [(2, 2, 8, 16), (5, 1, 64, 64), (6, 2, 16, 4), (8, 4, 256, 64), (2, 1, 80, 128)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (30, False), (64, True)])
def test_pictures_beside_text(dtype, device, window, chunked, q_heads, kv_heads, head_dim, block_size):
    case, ends = Case(LENS, (q_heads, kv_heads), head_dim, block_size, dtype, device), picture_ends(ROWS, PICTURES)
    ends = ends.to(device)
    got = triton.paged_attention(*case.step(ROWS), case.scale, window, chunked=chunked, seen_ends=ends)
    assert_close(got, case.exact(ROWS, window, chunked=chunked, seen_ends=ends))


def test_rows_without_pictures_keep_their_bits(dtype, device):
    case = Case(LENS, (6, 2), 32, 16, dtype, device)
    step, ends = case.step(ROWS), picture_ends(ROWS, PICTURES).to(device)
    plain = triton.paged_attention(*step, case.scale, 0)
    assert torch.equal(triton.paged_attention(*step, case.scale, 0, seen_ends=torch.zeros_like(ends)), plain)


def test_sinks_and_caps_within_pictures(dtype, device):
    case, rows = Case([100], (4, 2), 32, 16, dtype, device), [(0, 20, 100)]
    step, ends = case.step(rows), picture_ends(rows, {0: [(30, 90)]}).to(device)
    wide = [t.float() if t.is_floating_point() else t for t in step]
    for sinks, cap in ((torch.linspace(-3, 4, 4).to(device), 0.0), (None, 2.0)):
        got = triton.paged_attention(*step, 2 * case.scale, 25, sinks, cap, seen_ends=ends)
        assert_close(got, reference.paged_attention(*wide, 2 * case.scale, 25, sinks, cap, seen_ends=ends))


def test_padding_tokens_see_nothing_more(dtype, device):
    """Rows without tokens are skipped, whatever their ends."""
    case, rows = Case([40, 70], (4, 2), 32, 16, dtype, device), [(0, 0, 40), (1, 60, 70)]
    q, k, v, tables, start, lens = case.step(rows)
    ends = picture_ends(rows, {0: [(5, 30)]}).to(device)
    start = torch.cat((start, start[-1:]))
    tables, lens = torch.cat((tables, tables[:1])), torch.cat((lens, lens[:1]))
    got = chunk_attention(q, k, v, tables, start, lens, case.scale, 0, seen_ends=ends)
    assert_close(got, case.exact(rows, seen_ends=ends))
