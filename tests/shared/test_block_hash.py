"""Encoding of page names and hashes."""

from __future__ import annotations

from quire.shared.columns import u32_bytes
from quire.shared.kv import block_hash

FIRST, SECOND = b"a" * 32, b"b" * 32


def test_names_travel_as_hashes_and_groups() -> None:
    names = [FIRST, block_hash.page_name(FIRST, 2), block_hash.page_name(SECOND, 255)]
    assert len(set(names)) == 3
    assert [block_hash.page_of(name) for name in names] == [(0, FIRST), (2, FIRST), (255, SECOND)]
    hashes, groups = block_hash.join_names(names)
    assert (hashes, groups) == (FIRST + FIRST + SECOND, u32_bytes([0, 2, 255]))
    assert block_hash.split_names(hashes, groups) == names


def test_names_of_one_group_cost_no_column() -> None:
    assert block_hash.join_names([FIRST, SECOND]) == (FIRST + SECOND, b"")
    assert block_hash.split_names(FIRST + SECOND, b"") == [FIRST, SECOND]
    assert block_hash.join_names([]) == (b"", b"")
