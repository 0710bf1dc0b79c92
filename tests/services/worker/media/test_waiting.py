"""Items of equal shape are encoded together, within a bound, in order, and those of ended attachments are dropped."""

from __future__ import annotations

import numpy as np

from quire.services.worker.media.waiting import MOST_PIXELS, FetchedOrder, WaitingMedia
from quire.services.worker.step.fetched_item import FetchedItem, FetchedRows


def order(name: str, side: int, receiver: str = "now", tiles: int = 1, num_releases: int = 0) -> FetchedOrder:
    pixels = np.zeros((tiles, side, side, 3), dtype=np.uint8)
    return FetchedOrder(receiver, FetchedItem(name.encode(), 1, (), pixels), lambda error: None, num_releases)


def taken(waiting: WaitingMedia, num_releases: int = 0) -> tuple[str, bool]:
    orders, is_last = waiting.take_batch(lambda receiver: receiver == "now", num_releases)
    return "".join(one.item.identifier.decode() for one in orders), is_last


def test_equal_shapes_are_taken_together_and_others_wait() -> None:
    waiting = WaitingMedia()
    announced = [waiting.put(order(name, side)) for name, side in [("a", 8), ("b", 16), ("c", 8), ("d", 16)]]
    assert announced == [True, False, False, False]
    assert [taken(waiting), taken(waiting)] == [("ac", False), ("bd", True)]
    assert waiting.put(order("e", 8))


def test_a_call_has_a_bounded_number_of_pixels() -> None:
    waiting, side = WaitingMedia(), 336
    for name in "abcdefghijklmnopqrst":
        waiting.put(order(name, side))
    assert [(len(names), is_last) for names, is_last in (taken(waiting) for _ in range(3))] == [
        (9, False),
        (9, False),
        (2, True),
    ]
    assert 9 * side * side <= MOST_PIXELS < 10 * side * side


def test_an_item_beyond_the_bound_is_taken_alone() -> None:
    waiting = WaitingMedia()
    for name in "ab":
        waiting.put(order(name, 448, tiles=13))
    assert [taken(waiting), taken(waiting)] == [("a", False), ("b", True)]


def test_batch_invariance_takes_items_one_by_one() -> None:
    waiting = WaitingMedia(most_items=1)
    for name in "abc":
        waiting.put(order(name, 8))
    assert [taken(waiting) for _ in range(3)] == [("a", False), ("b", False), ("c", True)]


def test_items_of_ended_attachments_are_dropped() -> None:
    waiting = WaitingMedia()
    for name, receiver in [("a", "before"), ("b", "now"), ("c", "before")]:
        waiting.put(order(name, 8, receiver))
    assert taken(waiting) == ("b", True)
    assert waiting.put(order("d", 8, "before"))
    assert taken(waiting) == ("", True)


def test_an_item_is_encoded_after_the_releases_that_were_ordered_before_it() -> None:
    """The room that they leave is its own; a command that was queued before them must not take it."""
    waiting = WaitingMedia()
    for name, num_releases in [("a", 0), ("b", 2), ("c", 1), ("d", 0)]:
        waiting.put(order(name, 8, num_releases=num_releases))
    assert [taken(waiting, done) for done in (0, 0, 1, 2)] == [("ad", False), ("", False), ("c", False), ("b", True)]


def test_rows_are_taken_one_item_at_a_time() -> None:
    waiting = WaitingMedia()
    for name in "ab":
        waiting.put(order(name, 8))
        rows = FetchedRows(name.upper().encode(), 1, np.zeros((1, 8), np.uint8))
        waiting.put(FetchedOrder("now", rows, lambda error: None))
    assert [taken(waiting) for _ in range(3)] == [("ab", False), ("A", False), ("B", True)]
