"""Beginnings of blocks are found by their tokens, and only where they are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from quire.services.scheduler.kv_cache.part_index import BlockPart, PartIndex
from quire.shared.columns import i32_bytes

SIZE, GRAIN = 8, 2


def content(tokens: list[int], parent: bytes = b"root") -> bytes:
    return parent.ljust(32) + i32_bytes(tokens)


def test_the_longest_beginning_is_found_to_the_token() -> None:
    index = PartIndex(SIZE, GRAIN)
    index.note(1, content([1, 2, 3, 4, 5]))
    index.note(2, content([1, 2, 9, 9, 9, 9, 9, 9]))
    index.publish()
    assert index.find(content([1, 2, 3, 4, 5, 6])) == BlockPart(1, 5, is_all=True)
    assert index.find(content([1, 2, 3, 4, 7])) == BlockPart(1, 4, is_all=False)
    assert index.find(content([1, 2, 7])) == BlockPart(2, 2, is_all=False), "the latest of those that begin alike"
    assert index.find(content([1, 7, 3])) is None, "less than a grain"


def test_another_block_with_the_same_beginning_is_found_after_removal() -> None:
    index = PartIndex(SIZE, GRAIN)
    for block in (1, 2, 3, 4):
        index.note(block, content([1, 2, 3, 10 + block]))
        index.publish()
    assert index.find(content([1, 2, 3])) == BlockPart(4, 3, is_all=False)
    index.remove(2)
    for gone, found in ((4, 3), (3, 1)):
        index.remove(gone)
        assert index.find(content([1, 2, 3])) == BlockPart(found, 3, is_all=False)
    index.remove(1)
    assert index.find(content([1, 2, 3])) is None
    assert not index.newest
    assert not index.older


def test_equal_tokens_after_another_prefix_are_not_found() -> None:
    index = PartIndex(SIZE, GRAIN)
    index.note(1, content([1, 2, 3, 4]))
    index.publish()
    assert index.find(content([1, 2, 3, 4], parent=b"another")) is None


def test_unpublished_content_is_not_found() -> None:
    index = PartIndex(SIZE, GRAIN)
    index.note(1, content([1, 2, 3, 4]))
    assert index.find(content([1, 2, 3, 4])) is None
    index.publish()
    index.note(1, content([1, 2, 3, 4, 5, 6]))
    assert index.find(content([1, 2, 3, 4])) == BlockPart(1, 4, is_all=False), "more is on its way into that block"


def test_a_key_collision_costs_only_a_hit() -> None:
    index = PartIndex(SIZE, GRAIN, key_of=lambda _: 0)
    index.note(1, content([1, 2, 3, 4]))
    index.note(2, content([5, 6, 7, 8]))
    index.publish()
    assert index.find(content([1, 2, 3, 4])) is None
    assert index.find(content([5, 6, 7, 8])) == BlockPart(2, 4, is_all=True)
    assert index.find(content([5, 6, 7, 8], parent=b"another")) is None
    index.remove(2)
    assert index.find(content([5, 6, 7, 8])) is None


tokens = st.lists(st.integers(0, 2), min_size=GRAIN, max_size=SIZE)
parents = st.sampled_from([b"a", b"b"])
blocks = st.integers(1, 6)
History = list[tuple[int, bytes, list[int], str]]


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(blocks, parents, tokens, st.sampled_from(["fill", "go on", "forget"])), max_size=30),
    parents,
    tokens,
)
def test_found_content_is_correct(history: History, parent: bytes, wanted: list[int]) -> None:
    index = PartIndex(SIZE, GRAIN)
    held: dict[int, tuple[bytes, list[int]]] = {}
    forgot = False
    for block, before, listed, change in history:
        if change == "go on" and block in held:
            held[block] = held[block][0], (held[block][1] + listed)[:SIZE]
        else:
            index.remove(block)
            forgot |= held.pop(block, None) is not None
            if change == "forget":
                continue
            held[block] = before, listed
        index.note(block, content(held[block][1], held[block][0]))
        index.publish()
    found = index.find(content(wanted, parent))
    common = {block: num_common(listed, wanted) for block, (before, listed) in held.items() if before == parent}
    if found is not None:
        assert found.num_tokens == common[found.block] >= GRAIN
        assert found.is_all == (found.num_tokens == len(held[found.block][1]))
    if not forgot:
        longest = min(max(common.values(), default=0), SIZE - 1) // GRAIN * GRAIN
        assert (found.num_tokens if found else 0) >= longest


def num_common(one: list[int], other: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
