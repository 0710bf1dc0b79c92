from __future__ import annotations

import pytest
import torch

from quire.kernels import cpu, reference
from tests.kernels.cpu.closeness import assert_close, needs_library
from tests.kernels.cpu.paged import NAN, exact, exact_path, paged, random_tree

pytestmark = pytest.mark.skipif(**needs_library)

# float32 scores of magnitude 10 have errors of 1e-6, which propagate to the weights.
ABSOLUTE = {torch.float32: 6e-6, torch.bfloat16: 8e-3}  # bfloat16 rounds the weights too


@pytest.mark.parametrize("window", [0, 1, 50])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"),
    [
        (1, 1, 16, 1),
        (4, 2, 32, 16),
        (6, 2, 64, 7),
        (16, 2, 80, 16),
        (3, 3, 96, 128),
        (8, 1, 128, 32),
        (2, 1, 256, 5),
        (70, 1, 8, 16),
        (2, 2, 5, 3),
    ],
)
def test_is_attention(dtype, q_heads, kv_heads, head_dim, block_size, window):
    case = paged([1, 200, 64, 65, 131], q_heads, kv_heads, head_dim, block_size, dtype)
    # a first token, a decode, a whole prompt, a last chunk, a chunk that ends before the last token
    rows = [(0, 0, 1), (1, 199, 200), (2, 0, 64), (3, 30, 65), (4, 100, 130)]
    got = cpu.paged_attention(*case.step(rows), head_dim**-0.5, window)
    assert_close(got, exact(case, rows, head_dim**-0.5, window), absolute=ABSOLUTE[dtype])


# The reference rounds bfloat16 weights too.
@pytest.mark.parametrize("window", [0, 33])
def test_is_the_reference(dtype, window):
    case = paged([300, 17, 80], 8, 2, 64, 16, dtype)
    for rows in ([(0, 299, 300), (1, 16, 17), (2, 79, 80)], [(0, 150, 300), (1, 16, 17), (2, 0, 80)]):
        step = case.step(rows)
        got, want = cpu.paged_attention(*step, 0.125, window), reference.paged_attention(*step, 0.125, window)
        assert_close(got, want, units=2, absolute=2 * ABSOLUTE[dtype])


@pytest.mark.parametrize("window", [0, 33])
def test_sinks_take_their_share(dtype, window):
    case, sinks = paged([300, 17, 80], 8, 2, 64, 16, dtype), torch.linspace(-3, 4, 8)
    for rows in ([(0, 299, 300), (1, 16, 17), (2, 79, 80)], [(0, 150, 300), (1, 16, 17), (2, 0, 80)]):
        step = case.step(rows)
        got, plain = (cpu.paged_attention(*step, 0.125, window, given) for given in (sinks, None))
        want = reference.paged_attention(*step, 0.125, window, sinks)
        assert_close(got, want, units=2, absolute=2 * ABSOLUTE[dtype])
        assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("scale", [0.125, 100.0])  # with the second, all scores are at a cap
def test_scores_are_capped(dtype, window, scale):
    case = paged([300, 17, 80], 8, 2, 64, 16, dtype)
    for rows in ([(0, 299, 300), (1, 16, 17), (2, 79, 80)], [(0, 150, 300), (1, 16, 17), (2, 0, 80)]):
        step = case.step(rows)
        got, plain = (cpu.paged_attention(*step, scale, window, None, cap) for cap in (2.0, 0.0))
        want = reference.paged_attention(*step, scale, window, None, 2.0)
        assert_close(got, want, units=2, absolute=2 * ABSOLUTE[dtype])
        assert (got - plain).abs().max() > 0.01


@pytest.mark.parametrize("chunk", [1, 50, 64, 130])
def test_rows_see_their_own_chunk_only(dtype, chunk):
    """Covers steps with rows of several chunks, and a chunk that begins behind the last row."""
    case = paged([1, 200, 64, 65, 131], 6, 2, 64, 7, dtype)
    rows = [(0, 0, 1), (1, 199, 200), (2, 0, 64), (3, 30, 65), (4, 100, 130)]
    got = cpu.paged_attention(*case.step(rows), 0.125, chunk, chunked=True)
    assert_close(got, exact(case, rows, 0.125, chunk, chunked=True), absolute=ABSOLUTE[dtype])
    parts = [cpu.paged_attention(*case.step([(1, at, at + 1)]), 0.125, chunk, chunked=True) for at in range(45, 135)]
    whole = cpu.paged_attention(*case.step([(1, 45, 135)]), 0.125, chunk, chunked=True)
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim"), [(4, 2, 32), (8, 1, 80), (3, 3, 128)])
def test_row_has_the_same_bits_for_any_chunking(dtype, q_heads, kv_heads, head_dim, window):
    case = paged([260, 90], q_heads, kv_heads, head_dim, 16, dtype)
    whole = cpu.paged_attention(*case.step([(0, 0, 260)]), 0.2, window)
    for chunk in (1, 7, 32, 64, 100):
        parts = []
        for begin in range(0, 260, chunk):
            end = min(begin + chunk, 260)
            step = case.step([(1, 3, 90), (0, begin, end), (1, 89, 90)])
            parts.append(cpu.paged_attention(*step, 0.2, window)[87 : 87 + end - begin])
        assert torch.equal(torch.cat(parts), whole), chunk


def test_block_size_does_not_change_bits(dtype):
    results = []
    for block_size in (1, 16, 37, 256):
        torch.manual_seed(3)
        case = paged([200], 4, 2, 64, 200, dtype)
        dense = [cache[case.tables[0][0]] for cache in (case.k_cache, case.v_cache)]  # [200, heads, head_dim]
        count = -(-200 // block_size)
        caches = [torch.full((count + 1, block_size, 2, 64), NAN).to(dtype) for _ in range(2)]
        for cache, values in zip(caches, dense, strict=True):
            cache.view(-1, 2, 64)[block_size : block_size + 200] = values
        table = torch.arange(1, count + 1).int().view(1, -1)
        start, lens = torch.tensor([0, 200]).int(), torch.tensor([200]).int()
        results.append(cpu.paged_attention(case.q[0], *caches, table, start, lens, 0.125, 0))
    for other in results[1:]:
        assert torch.equal(results[0], other)


def test_threads_do_not_change_bits(dtype):
    case = paged([400, 30, 222], 8, 4, 64, 16, dtype)
    step = case.step([(0, 100, 400), (1, 29, 30), (2, 221, 222)])
    results = []
    for threads in (1, 2, 5):
        cpu.set_num_threads(threads)
        results.append(cpu.paged_attention(*step, 0.125, 0))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_blocks_before_the_window_may_be_gone(dtype):
    """They may belong to other sequences by now, and their entries in the block table may be the null block."""
    case = paged([150], 4, 2, 32, 16, dtype)
    rows = [(0, 140, 150)]
    before = cpu.paged_attention(*case.step(rows), 0.2, 20)
    gone = (140 - 20 + 1) // 16
    for block in case.tables[0][:gone]:
        case.k_cache[block] = NAN
        case.v_cache[block] = NAN
    case.tables[0][:gone] = [0] * gone
    assert torch.equal(cpu.paged_attention(*case.step(rows), 0.2, 20), before)


def test_tables_may_be_part_of_wider_ones(dtype):
    case = paged([40, 50], 4, 2, 32, 16, dtype)
    q, k, v, tables, *rest = case.step([(0, 39, 40), (1, 49, 50)])
    wide = torch.full((9, 100), -1, dtype=torch.int32)
    wide[:2, : tables.size(1)] = tables
    part = wide[:2, : tables.size(1)]
    got, want = (cpu.paged_attention(q, k, v, table, *rest, 0.2, 0) for table in (part, tables))
    assert torch.equal(got, want)


def test_a_nan_stays_in_its_sequence(dtype):
    case = paged([70, 80], 4, 2, 32, 16, dtype)
    rows = [(0, 60, 70), (1, 70, 80)]
    clean = cpu.paged_attention(*case.step(rows), 0.2, 0)
    case.q[0][65] = NAN
    got = cpu.paged_attention(*case.step(rows), 0.2, 0)
    assert got[5].isnan().all()
    others = [i for i in range(20) if i != 5]
    assert torch.equal(got[others], clean[others])


def test_large_scores_do_not_overflow(dtype):
    case = paged([100], 2, 1, 64, 16, dtype)
    case.q[0] *= 1000
    rows = [(0, 0, 100)]
    got = cpu.paged_attention(*case.step(rows), 1.0, 0)
    assert_close(got, exact(case, rows, 1.0, 0), units=2, absolute=2e-2)


def test_other_dtypes_go_to_the_reference():
    case = paged([20], 4, 2, 32, 16, torch.float16)
    step = case.step([(0, 5, 20)])
    assert torch.equal(cpu.paged_attention(*step, 0.2, 0), reference.paged_attention(*step, 0.2, 0))


def test_a_cache_in_huge_pages_is_a_cache_like_any_other():
    cache = cpu.prefer_huge_pages(torch.empty(3 << 20))
    cache[:] = 1
    assert cache.sum() == 3 << 20


@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 32, 7), (8, 1, 80, 16), (1, 1, 5, 1)]
)
@pytest.mark.parametrize("package", [cpu, reference])
def test_rows_of_a_tree_see_their_own_path(dtype, package, q_heads, kv_heads, head_dim, block_size):
    """Covers trees beside a chunk and a decode, across a tile boundary, alone in a batch, and of the maximum size."""
    case = paged([140, 70, 90, 63, 9, 150], q_heads, kv_heads, head_dim, block_size, dtype)
    rows = [(0, 122, 140), (1, 69, 70), (2, 10, 90), (3, 0, 63), (4, 8, 9), (5, 87, 150)]
    trees = {seq: random_tree(end - begin - 1) for seq, begin, end in rows if seq in (0, 3, 5)}
    whole = {seq: torch.full((end - begin,), -1) for seq, begin, end in rows}
    masks = torch.cat([trees[seq][0] if seq in trees else whole[seq] for seq, _, _ in rows])
    scale = head_dim**-0.5
    got = package.paged_attention(*case.step(rows), scale, 0, tree_mask=masks).split([end - at for _, at, end in rows])
    for found, (seq, begin, end) in zip(got, rows, strict=True):
        if seq in trees:
            want = torch.stack([exact_path(case, seq, begin, path, scale) for path in trees[seq][1]])
        else:
            want = exact(case, [(seq, begin, end)], scale, 0)
        assert_close(found, want, absolute=ABSOLUTE[dtype])


@pytest.mark.parametrize("package", [cpu, reference])
def test_single_rows_of_trees_see_their_own_path(dtype, package):
    """A drafter computes the rows of a tree one after the other."""
    case, (masks, paths) = paged([80, 33], 4, 2, 32, 16, dtype), random_tree(12)
    rows = [(0, 70, 71), (1, 31, 32)]
    got = package.paged_attention(*case.step(rows), 0.2, 0, tree_mask=masks[[11, 5]])
    want = [exact_path(case, seq, at - row, paths[row], 0.2) for (seq, at, _), row in zip(rows, (11, 5), strict=True)]
    assert_close(got, torch.stack(want), absolute=ABSOLUTE[dtype])


def test_capped_scores_of_other_paths_are_not_seen(dtype):
    case, (masks, _) = paged([100], 4, 2, 32, 16, dtype), random_tree(20)
    step = case.step([(0, 79, 100)])
    got, want = (p.paged_attention(*step, 3.0, 0, None, 2.0, tree_mask=masks) for p in (cpu, reference))
    assert_close(got, want, units=2, absolute=2 * ABSOLUTE[dtype])
