"""Tokens of a picture see each other; all others see what is before them."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close
from tests.kernels.cpu.paged import exact, paged, picture_ends
from tests.kernels.cpu.test_attention import ABSOLUTE

LENS = [140, 70, 300, 63, 9]
# A prompt, a decode, a chunk after cached tokens, a chunk that ends with a picture, a chunk of one token.
ROWS = [(0, 0, 140), (1, 69, 70), (2, 90, 300), (3, 10, 63), (4, 8, 9)]
# Over tiles and blocks, neighbours, one token, at the end, before the chunk, and the whole of a row's window.
PICTURES = {0: [(3, 67), (67, 100), (101, 102)], 2: [(20, 80), (90, 270), (299, 300)], 3: [(40, 63)], 4: [(8, 9)]}
SHAPES = [(6, 2, 32, 7), (8, 1, 80, 16), (1, 1, 5, 1), (4, 4, 128, 64), (130, 1, 16, 16)]


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize("package", [cpu, reference])
@pytest.mark.parametrize(("window", "chunked"), [(0, False), (30, False), (1, False), (64, True)])
def test_pictures_beside_text(dtype, package, window, chunked, q_heads, kv_heads, head_dim, block_size):
    case, ends = paged(LENS, q_heads, kv_heads, head_dim, block_size, dtype), picture_ends(ROWS, PICTURES)
    scale = head_dim**-0.5
    got = package.paged_attention(*case.step(ROWS), scale, window, chunked=chunked, seen_ends=ends)
    want = exact(case, ROWS, scale, window, chunked=chunked, seen_ends=ends)
    assert_close(got, want, absolute=ABSOLUTE[dtype])
    assert (want - exact(case, ROWS, scale, window, chunked=chunked)).abs().max() > 0.1, "the pictures are seen"


def test_rows_without_pictures_keep_their_bits(dtype):
    case = paged(LENS, 6, 2, 32, 16, dtype)
    step, ends = case.step(ROWS), picture_ends(ROWS, {0: PICTURES[0]})
    plain = cpu.paged_attention(*step, 0.2, 0)
    assert torch.equal(cpu.paged_attention(*step, 0.2, 0, seen_ends=torch.zeros_like(ends)), plain)
    beside = cpu.paged_attention(*step, 0.2, 0, seen_ends=ends)
    outside = (ends == 0).nonzero().flatten()
    assert torch.equal(beside[outside], plain[outside])


@pytest.mark.parametrize("threads", [1, 3])
def test_a_picture_has_the_same_bits_in_every_batch(dtype, threads):
    case, before = paged(LENS, 6, 2, 32, 16, dtype), cpu.num_threads()
    cpu.set_num_threads(threads)
    together = cpu.paged_attention(*case.step(ROWS), 0.2, 50, seen_ends=picture_ends(ROWS, PICTURES))
    alone = [cpu.paged_attention(*case.step([row]), 0.2, 50, seen_ends=picture_ends([row], PICTURES)) for row in ROWS]
    cpu.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize(("sinks", "cap"), [(torch.linspace(-3, 4, 4), 0.0), (None, 2.0)])
def test_sinks_and_caps_within_pictures(dtype, sinks, cap):
    case, rows = paged([100], 4, 2, 32, 16, dtype), [(0, 20, 100)]
    ends = picture_ends(rows, {0: [(30, 90)]})
    got, want = (
        package.paged_attention(*case.step(rows), 0.6, 25, sinks, cap, seen_ends=ends) for package in (cpu, reference)
    )
    assert_close(got, want, units=2, absolute=2 * ABSOLUTE[dtype])


def test_one_row_per_sequence_sees_up_to_itself(dtype):
    case, rows = paged([33, 20], 4, 2, 32, 16, dtype), [(0, 32, 33), (1, 19, 20)]
    for package in (cpu, reference):
        plain = package.paged_attention(*case.step(rows), 0.2, 0)
        ends = picture_ends(rows, {0: [(10, 33)]})
        assert torch.equal(package.paged_attention(*case.step(rows), 0.2, 0, seen_ends=ends), plain)
