"""The record of what blocks hold: right hashes for what is there, silence about what is not."""

from __future__ import annotations

import numpy as np

from quire.services.worker.kv.held_blocks import HeldBlocks
from quire.shared.columns import i32_bytes
from quire.shared.kv.block_hash import chain, root_hash, split

ROOT = root_hash(salt="someone")


def record() -> HeldBlocks:
    return HeldBlocks(num_blocks=12, block_size=4)


def hand_out(held: HeldBlocks, blocks: list[int], before: int = 0, root: bytes = ROOT) -> None:
    parents = [before, *blocks[:-1]]
    held.hand_out(np.array(blocks), np.array(parents), {} if before else {blocks[0]: root})


def write(held: HeldBlocks, blocks: list[int], tokens: list[int], start: int = 0) -> None:
    """Tokens of a sequence from position `start` on."""
    positions = range(start, start + len(tokens))
    places = [blocks[p // 4] * 4 + p % 4 for p in positions]
    held.write(np.array(places, dtype=np.int32), np.array(tokens, dtype=np.int32))


def report(held: HeldBlocks) -> dict[int, bytes]:
    found = held.report()
    return dict(zip(found.block_ids, split(found.hashes), strict=True))


def hashes(tokens: list[int], root: bytes = ROOT) -> list[bytes]:
    return chain(root, i32_bytes(tokens), 4)


def test_full_blocks_are_reported_by_the_hash_of_their_chain() -> None:
    held, tokens = record(), list(range(10))
    hand_out(held, [7, 3, 9])
    write(held, [7, 3, 9], tokens)
    assert report(held) == dict(zip([7, 3], hashes(tokens), strict=True))


def test_a_block_becomes_known_when_its_last_token_is_written() -> None:
    held, tokens = record(), [5, 6, 7, 8]
    hand_out(held, [2])
    for position, token in enumerate(tokens):
        assert report(held) == {}
        write(held, [2], [token], start=position)
    assert report(held) == {2: hashes(tokens)[0]}


def test_a_block_that_is_handed_out_anew_loses_its_record() -> None:
    held = record()
    hand_out(held, [1, 2])
    write(held, [1, 2], list(range(8)))
    hand_out(held, [2], before=1)
    assert list(report(held)) == [1]
    write(held, [1, 2], [9, 9, 9, 9], start=4)
    assert report(held)[2] == hashes([0, 1, 2, 3, 9, 9, 9, 9])[1]


def test_blocks_behind_one_that_was_handed_out_anew_are_not_reported() -> None:
    """Even if that one is full again: their chain led through what it held before."""
    held = record()
    hand_out(held, [1, 2, 3])
    write(held, [1, 2, 3], list(range(12)))
    hand_out(held, [1])
    write(held, [1], [50, 51, 52, 53])
    assert report(held) == {1: hashes([50, 51, 52, 53])[0]}


def test_a_sequence_behind_shared_blocks_goes_on_with_their_chain() -> None:
    held = record()
    hand_out(held, [1, 2])
    write(held, [1, 2], list(range(8)))
    hand_out(held, [5], before=1)
    write(held, [1, 5], [7, 7, 7, 7], start=4)
    assert report(held)[5] == hashes([0, 1, 2, 3, 7, 7, 7, 7])[1]


def test_roots_keep_tenants_apart() -> None:
    held, other = record(), root_hash(salt="someone else")
    hand_out(held, [1])
    hand_out(held, [2], root=other)
    for block in (1, 2):
        write(held, [block], [1, 2, 3, 4])
    assert report(held) == {1: hashes([1, 2, 3, 4])[0], 2: hashes([1, 2, 3, 4], other)[0]}


def test_a_reset_forgets_what_is_there_and_what_is_built_on_it() -> None:
    held = record()
    hand_out(held, [1, 2])
    write(held, [1, 2], list(range(6)))
    held.forget()
    write(held, [1, 2], [6, 7], start=6)
    hand_out(held, [3], before=2)
    write(held, [1, 2, 3], [8, 9, 10, 11], start=8)
    assert report(held) == {}
    hand_out(held, [4])
    write(held, [4], [1, 2, 3, 4])
    assert list(report(held)) == [4]


def test_writes_to_the_null_block_are_nothing() -> None:
    held = record()
    held.write(np.arange(4, dtype=np.int32), np.arange(4, dtype=np.int32))
    assert report(held) == {}
