"""Triggering of collections for memory that tests leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

from tests.leftovers import MUCH, Leftovers, resident_bytes


class Ring:
    def __init__(self) -> None:
        self.itself = self


class Collections:
    """Counts collections instead of running them: one takes seconds in a process that has imported everything."""

    def __init__(self) -> None:
        self.count = 0

    def run(self) -> None:
        self.count += 1


def collects(leftovers: Leftovers, collections: Collections) -> bool:
    before = collections.count
    leftovers.let_go()
    return collections.count > before


def begin(size: Callable[[], int]) -> tuple[Leftovers, Collections]:
    collections = Collections()
    return Leftovers(size, collections.run), collections


def test_little_stays_and_much_goes() -> None:
    case = begin(iter([100, 100 + MUCH, 101 + MUCH, 50]).__next__)
    assert not collects(*case)
    assert collects(*case)


def test_much_is_what_came_since_the_process_was_small() -> None:
    case = begin(iter([MUCH, 0, MUCH + 1, 2 * MUCH, 3 * MUCH, 3 * MUCH + 1, 3 * MUCH]).__next__)
    assert not collects(*case)  # smaller than at first
    assert collects(*case)  # and then larger, also after the collection
    assert not collects(*case)
    assert collects(*case)


def test_a_collection_frees_what_refers_to_itself() -> None:
    gc.disable()
    try:
        ring = weakref.ref(Ring())
        Leftovers(iter([0, 1 + MUCH, 0]).__next__).let_go()
        assert ring() is None
    finally:
        gc.enable()


def test_this_process_has_a_size() -> None:
    assert resident_bytes() > 1 << 20
    assert not collects(*begin(resident_bytes))
