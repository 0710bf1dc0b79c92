"""Record of block contents: right hashes for known blocks, no report of others."""

from __future__ import annotations

import numpy as np

from quire.services.worker.kv.block_contents import BlockContents
from quire.shared.columns import i32_bytes
from quire.shared.kv.block_hash import chain, root_hash, split

ROOT = root_hash(salt="someone")


def record() -> BlockContents:
    return BlockContents(num_blocks=12, block_size=4)


def allocate(contents: BlockContents, blocks: list[int], before: int = 0, root: bytes = ROOT) -> None:
    parents = [before, *blocks[:-1]]
    contents.allocate(np.array(blocks), np.array(parents), {} if before else {blocks[0]: root})


def write(contents: BlockContents, blocks: list[int], tokens: list[int], start: int = 0) -> None:
    """Records tokens of a sequence from position `start` on."""
    positions = range(start, start + len(tokens))
    places = [blocks[p // 4] * 4 + p % 4 for p in positions]
    contents.record_tokens(np.array(places, dtype=np.int32), np.array(tokens, dtype=np.int32))


def report(contents: BlockContents) -> dict[int, bytes]:
    found = contents.report()
    return dict(zip(found.block_ids, split(found.hashes), strict=True))


def hashes(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    return chain(root, i32_bytes(tokens), 4)


def test_full_blocks_are_reported_by_the_hash_of_their_chain() -> None:
    contents, tokens = record(), list(range(10))
    allocate(contents, [7, 3, 9])
    write(contents, [7, 3, 9], tokens)
    assert report(contents) == dict(zip([7, 3], hashes(tokens), strict=True))


def test_block_is_reported_once_it_is_full() -> None:
    contents, tokens = record(), [5, 6, 7, 8]
    allocate(contents, [2])
    for position, token in enumerate(tokens):
        assert report(contents) == {}
        write(contents, [2], [token], start=position)
    assert report(contents) == {2: hashes(tokens)[0]}


def test_reallocated_block_loses_its_record() -> None:
    contents = record()
    allocate(contents, [1, 2])
    write(contents, [1, 2], list(range(8)))
    allocate(contents, [2], before=1)
    assert list(report(contents)) == [1]
    write(contents, [1, 2], [9, 9, 9, 9], start=4)
    assert report(contents)[2] == hashes([0, 1, 2, 3, 9, 9, 9, 9])[1]


def test_children_of_a_reallocated_block_are_not_reported() -> None:
    """Even if that block is full again, as their hash chain depended on its old content."""
    contents = record()
    allocate(contents, [1, 2, 3])
    write(contents, [1, 2, 3], list(range(12)))
    allocate(contents, [1])
    write(contents, [1], [50, 51, 52, 53])
    assert report(contents) == {1: hashes([50, 51, 52, 53])[0]}


def test_sequence_after_shared_blocks_continues_their_chain() -> None:
    contents = record()
    allocate(contents, [1, 2])
    write(contents, [1, 2], list(range(8)))
    allocate(contents, [5], before=1)
    write(contents, [1, 5], [7, 7, 7, 7], start=4)
    assert report(contents)[5] == hashes([0, 1, 2, 3, 7, 7, 7, 7])[1]


def test_roots_keep_tenants_apart() -> None:
    contents, other = record(), root_hash(salt="someone else")
    allocate(contents, [1])
    allocate(contents, [2], root=other)
    for block in (1, 2):
        write(contents, [block], [1, 2, 3, 4])
    assert report(contents) == {1: hashes([1, 2, 3, 4])[0], 2: hashes([1, 2, 3, 4], other)[0]}


def test_reset_discards_blocks_and_their_descendants() -> None:
    contents = record()
    allocate(contents, [1, 2])
    write(contents, [1, 2], list(range(6)))
    contents.reset()
    write(contents, [1, 2], [6, 7], start=6)
    allocate(contents, [3], before=2)
    write(contents, [1, 2, 3], [8, 9, 10, 11], start=8)
    assert report(contents) == {}
    allocate(contents, [4])
    write(contents, [4], [1, 2, 3, 4])
    assert list(report(contents)) == [4]


def test_writes_to_the_null_block_are_nothing() -> None:
    contents = record()
    contents.record_tokens(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    assert report(contents) == {}
