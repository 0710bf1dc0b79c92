from __future__ import annotations

import pytest
import torch

from quire.kernels.triton.attention.shared_prefix import SharedPrefixes, rows_per_tile, shared_prefix_attention
from tests.kernels.triton.closeness import assert_close
from tests.kernels.triton.paged import Case


def grouped(device, groups: dict[tuple[int, ...], int], num_rows: int, per_tile: int) -> SharedPrefixes:
    """Builds prefixes from `groups` (shared positions by rows), with one unused tile."""
    members, tables, lens, starts = [], [], [], [0] * num_rows
    for rows, length in groups.items():
        for first in range(0, len(rows), per_tile):
            tile = list(rows[first : first + per_tile])
            members.append(tile + [-1] * (per_tile - len(tile)))
            tables.append(rows[0])
            lens.append(length)
        for row in rows:
            starts[row] = length
    columns = ([*members, [-1] * per_tile], [*tables, 0], [*lens, 0], starts)
    return SharedPrefixes(*(torch.tensor(column, dtype=torch.int32, device=device) for column in columns))


def share(case: Case, rows: tuple[int, ...], blocks: int) -> None:
    for row in rows[1:]:
        case.paged.tables[row][:blocks] = case.paged.tables[rows[0]][:blocks]


@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "block_size"), [(6, 2, 32, 16), (2, 1, 80, 16), (8, 1, 128, 64)]
)
def test_sharing_changes_nothing(dtype, device, monkeypatch, q_heads, kv_heads, head_dim, block_size, splits):
    """Covers rows whose remainder is computed in one split together with the prefix, and in several splits."""
    monkeypatch.setattr("quire.kernels.triton.attention.shared_prefix.splits_for", lambda *_: splits)
    lens = [9 * 16 + 5, 200, 8 * 16 + 1, 30, 131, 129, 260]
    case = Case(lens, (q_heads, kv_heads), head_dim, block_size, dtype, device)
    groups = {(0, 2, 1): 128, (4, 5): 64}
    for rows, length in groups.items():
        share(case, rows, length // block_size)
    rows = [(i, n - 1, n) for i, n in enumerate(lens)]
    q, k, v, tables, _, seq_lens = case.step(rows)
    prefixes = grouped(device, groups, len(lens), min(rows_per_tile(q_heads, kv_heads), 2))
    got = shared_prefix_attention(q, k, v, tables, seq_lens, prefixes, case.scale)
    assert_close(got, case.exact(rows))


@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64, 128])
def test_many_rows(device, block_size):
    lens = [2048 + 7 * i + 1 for i in range(100)] + [50, 3000]
    case = Case(lens, (16, 8), 128, block_size, torch.bfloat16, device)
    together = tuple(range(100))
    share(case, together, 2048 // block_size)
    rows = [(i, n - 1, n) for i, n in enumerate(lens)]
    q, k, v, tables, _, seq_lens = case.step(rows)
    prefixes = grouped(device, {together: 2048}, len(lens), rows_per_tile(16, 8))
    got = shared_prefix_attention(q, k, v, tables, seq_lens, prefixes, case.scale)
    assert_close(got, case.exact(rows))
