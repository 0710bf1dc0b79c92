"""Triggering of collections for memory that tests leave."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest

from tests.leftovers import MUCH, Leftovers


class Ring:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _nobody_else_searches() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def stays(leftovers: Leftovers) -> bool:
    ring = weakref.ref(Ring())
    leftovers.let_go()
    return ring() is not None


def test_little_stays_and_much_goes() -> None:
    sizes = iter([100, 100 + MUCH, 101 + MUCH, 50])
    leftovers = Leftovers(sizes.__next__)
    assert stays(leftovers)
    assert not stays(leftovers)


def test_much_is_what_came_since_the_process_was_small() -> None:
    sizes = iter([MUCH, 0, MUCH + 1, 2 * MUCH, 3 * MUCH, 3 * MUCH + 1, 3 * MUCH])
    leftovers = Leftovers(sizes.__next__)
    assert stays(leftovers)  # smaller than at first
    assert not stays(leftovers)  # and then larger, also behind the search
    assert stays(leftovers)
    assert not stays(leftovers)


def test_this_process_has_a_size() -> None:
    before = Leftovers()
    assert stays(before)
