"""Rows of draft trees attend to known tokens and their own path."""

from __future__ import annotations

import pytest
import torch

from quire.kernels import reference, triton
from quire.kernels.triton.attention.chunk_attention import chunk_attention
from tests.kernels.cpu.paged import exact_path, random_tree
from tests.kernels.triton.attention.test_fp8_cache import step_of
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.paged import Case

# q heads, kv heads, head_dim, block_size: tiles of 64, 12, 21, 16 and 32 tokens
SHAPES = [(2, 2, 8, 16), (5, 1, 64, 64), (6, 2, 16, 4), (8, 2, 128, 64), (2, 1, 80, 128)]
# A tree of 17 drafts across a block boundary, a decode, a chunk, a tree that is a whole sequence, the maximum
# number of drafts.
LENS = [140, 70, 90, 63, 150]
ROWS = [(0, 122, 140), (1, 69, 70), (2, 10, 90), (3, 0, 63), (4, 87, 150)]
WITH_TREES = (0, 3, 4)

Tree = tuple[torch.Tensor, list[list[int]]]


def tree_of(parents: list[int]) -> Tree:
    """Returns a tree as random_tree(); parent -1: the row before all drafts."""
    paths = [[0]]
    for node, parent in enumerate(parents, 1):
        paths.append([*paths[parent + 1], node])
    masks = [sum(1 << node - row for row in path) - (1 << node + 1) for node, path in enumerate(paths)]
    return torch.tensor(masks), paths


TREES = {
    "chain": tree_of(list(range(-1, 39))),
    "siblings": tree_of([-1] * 40),
    "two chains": tree_of([-1, -1, *range(38)]),
    "binary": tree_of([(node - 2) // 2 for node in range(1, 41)]),
    "one draft": tree_of([-1]),
}


def masks_of(trees: dict[int, Tree], rows: list[tuple[int, int, int]]) -> torch.Tensor:
    whole = [torch.full((end - begin,), -1) for _, begin, end in rows]
    return torch.cat([trees[seq][0] if seq in trees else whole[i] for i, (seq, _, _) in enumerate(rows)])


def wanted(case: Case, rows: list[tuple[int, int, int]], trees: dict[int, Tree]) -> torch.Tensor:
    found = []
    for seq, begin, end in rows:
        if seq in trees:
            found += [exact_path(case.paged, seq, begin, path, case.scale) for path in trees[seq][1]]
        else:
            found += list(case.exact([(seq, begin, end)]).cpu())
    return torch.stack(found)


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), SHAPES)
def test_rows_of_a_tree_see_their_own_path(dtype, device, q_heads, kv_heads, head_dim, block_size):
    case = Case(LENS, (q_heads, kv_heads), head_dim, block_size, dtype, device)
    trees = {seq: random_tree(ROWS[seq][2] - ROWS[seq][1] - 1) for seq in WITH_TREES}
    masks = masks_of(trees, ROWS).to(device)
    got = triton.paged_attention(*case.step(ROWS), case.scale, 0, tree_mask=masks)
    assert_close(got.cpu(), wanted(case, ROWS, trees))


@pytest.mark.parametrize("first", [0, 25, 100])
@pytest.mark.parametrize("name", TREES)
def test_trees_of_all_shapes(dtype, device, name, first):
    """Trees begin at any position of a tile and of a block."""
    tree = TREES[name]
    end = first + len(tree[1])
    case = Case([end, 30], (4, 2), 32, 16, dtype, device)
    rows = [(0, first, end), (1, 29, 30)]
    got = triton.paged_attention(*case.step(rows), case.scale, 0, tree_mask=masks_of({0: tree}, rows).to(device))
    assert_close(got.cpu(), wanted(case, rows, {0: tree}))


def test_chains_and_single_tokens_are_trees(dtype, device):
    case = Case(LENS, (6, 2), 32, 16, dtype, device)
    masks = torch.full((sum(end - begin for _, begin, end in ROWS),), -1, device=device)
    step = case.step(ROWS)
    plain = triton.paged_attention(*step, case.scale, 0)
    assert_close(triton.paged_attention(*step, case.scale, 0, tree_mask=masks), plain.double())


def test_single_rows_see_their_own_path(dtype, device):
    """A drafter computes the rows of a tree one after the other."""
    case, (masks, paths) = Case([80, 33], (4, 2), 32, 16, dtype, device), random_tree(12)
    rows, nodes = [(0, 70, 71), (1, 31, 32)], (11, 5)
    q, k, v, tables, starts, lens = case.step(rows)
    want = [
        exact_path(case.paged, seq, at - node, paths[node], case.scale)
        for (seq, at, _), node in zip(rows, nodes, strict=True)
    ]
    mask = masks[list(nodes)].to(device)
    for given in (starts, None):
        got = triton.paged_attention(q, k, v, tables, given, lens, case.scale, 0, tree_mask=mask)
        assert_close(got.cpu(), torch.stack(want))


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("window", [5, 50])
def test_window_counts_cache_positions(dtype, device, window, chunked):
    """The window is counted in cache positions, as in the reference."""
    case = Case(LENS, (6, 2), 32, 16, dtype, device)
    trees = {seq: random_tree(ROWS[seq][2] - ROWS[seq][1] - 1) for seq in WITH_TREES}
    step, masks = case.step(ROWS), masks_of(trees, ROWS).to(device)
    got = triton.paged_attention(*step, case.scale, window, chunked=chunked, tree_mask=masks)
    wide = [t.float() if t.is_floating_point() else t for t in step]
    want = reference.paged_attention(*wide, case.scale, window, chunked=chunked, tree_mask=masks)
    assert_close(got, want)
    assert (want - reference.paged_attention(*wide, case.scale, window, chunked=chunked)).abs().max() > 0.01


def test_sinks_and_caps_along_a_path(dtype, device):
    case, (masks, _) = Case([100], (4, 2), 32, 16, dtype, device), random_tree(20)
    step, masks = case.step([(0, 79, 100)]), masks.to(device)
    wide = [t.float() if t.is_floating_point() else t for t in step]
    for sinks, cap in ((torch.linspace(-3, 4, 4).to(device), 0.0), (None, 2.0)):
        got = triton.paged_attention(*step, 2 * case.scale, 0, sinks, cap, tree_mask=masks)
        assert_close(got, reference.paged_attention(*wide, 2 * case.scale, 0, sinks, cap, tree_mask=masks))


@pytest.mark.parametrize(("q_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 16, 4), (8, 2, 128, 64)])
def test_a_cache_of_8_bits(dtype, device, q_heads, kv_heads, head_dim, block_size):
    case = Case(LENS, (q_heads, kv_heads), head_dim, block_size, dtype, device)
    trees = {seq: random_tree(ROWS[seq][2] - ROWS[seq][1] - 1) for seq in WITH_TREES}
    arguments, masks = step_of(case, ROWS), masks_of(trees, ROWS).to(device)
    got = triton.paged_attention(*arguments, case.scale, 0, tree_mask=masks)
    assert_close(got.cpu(), wanted(case, ROWS, trees), slack=2)


@pytest.mark.parametrize("num_padding", [0, 7, 70])
def test_a_step_in_a_larger_graph(dtype, device, num_padding):
    """Padding tokens are a prompt in the null block that sees every token; padding rows have no tokens."""
    case, tree = Case([40, 20, 70], (4, 2), 32, 16, dtype, device), random_tree(16)
    case.paged.k_cache[0] = case.paged.v_cache[0] = 0.5
    rows = [(0, 39, 40), (1, 3, 20), (2, 60, 70)]
    q, k, v, tables, start, lens = case.step(rows)
    used, total = q.size(0), q.size(0) + num_padding
    padded_q = torch.randn(total, *q.shape[1:]).to(q)
    padded_q[:used] = q
    padded_tables = torch.zeros(9, 8, dtype=torch.int32, device=device)
    padded_tables[:3, : tables.size(1)] = tables
    padded_start = torch.full((10,), total, dtype=torch.int32, device=device)
    padded_start[:4] = start
    padded_lens = torch.zeros(9, dtype=torch.int32, device=device)
    padded_lens[:3], padded_lens[3] = lens, num_padding
    masks = torch.full((total,), -1, device=device)
    masks[:used] = masks_of({1: tree}, rows)
    inputs = padded_tables, padded_start, padded_lens, case.scale, 0, None, 0.0, False, masks
    got = chunk_attention(padded_q, k, v, *inputs)
    assert_close(got[:used].cpu(), wanted(case, rows, {1: tree}))
    assert got.isfinite().all()
