"""Encoding of page names and hashes."""

from __future__ import annotations

import hashlib
import struct
from typing import NamedTuple

from quire.shared import columns
from quire.shared.columns import u32_bytes
from quire.shared.kv import block_hash
from quire.shared.kv.block_hash import chain, chain_with_media, media_of, root_hash

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


class Item(NamedTuple):
    """A media item as block hashes see it."""

    identifier: bytes
    offset: int
    length: int


IDENTIFIERS = {letter: hashlib.sha256(letter.encode()).digest() for letter in "abc"}
# Block size 11; tokens and items of the case that the multimodal fact sheet of vLLM's tests has.
TOKENS = columns.i32_bytes([*range(10), *[9] * 10, *range(10, 20), *[9] * 18, *[9] * 7, *[100] * 4])
ITEMS = [
    Item(IDENTIFIERS["a"], 11, 10),
    Item(IDENTIFIERS["b"], 30, 18),
    Item(IDENTIFIERS["c"], 48, 7),
]


def key(*pairs: tuple[str, int]) -> bytes:
    return b"".join(IDENTIFIERS[letter] + struct.pack("<i", offset) for letter, offset in pairs)


def test_blocks_name_the_media_that_they_overlap() -> None:
    found = [media_of(ITEMS, begin, begin + 11) for begin in range(0, 55, 11)]
    assert found == [key(), key(("a", 0)), key(("b", 8)), key(("b", -3)), key(("b", -14), ("c", 4))]


def test_the_same_tokens_with_another_picture_or_place_have_other_hashes() -> None:
    root = root_hash()
    plain, seen = chain(root, TOKENS, 11), chain_with_media(root, TOKENS, 11, ITEMS)
    assert seen[0] == plain[0]
    assert all(one != other for one, other in zip(plain[1:], seen[1:], strict=True))
    moved = [ITEMS[0]._replace(offset=12), *ITEMS[1:]]
    assert chain_with_media(root, TOKENS, 11, moved)[1] != seen[1]
    other = [ITEMS[0]._replace(identifier=IDENTIFIERS["c"]), *ITEMS[1:]]
    assert chain_with_media(root, TOKENS, 11, other)[1] != seen[1]
    last = [*ITEMS[:2], ITEMS[2]._replace(identifier=IDENTIFIERS["a"])]
    assert chain_with_media(root, TOKENS, 11, last)[:4] == seen[:4]


def test_a_chain_may_be_continued_anywhere() -> None:
    whole = chain_with_media(root_hash(), TOKENS, 11, ITEMS)
    for done in range(1, 5):
        rest = TOKENS[done * 11 * 4 :]
        assert chain_with_media(whole[done - 1], rest, 11, ITEMS, start=done * 11) == whole[done:]
