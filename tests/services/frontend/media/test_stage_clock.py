"""The time of a request's media is divided between stages, whatever their items do at the same time."""

from __future__ import annotations

from quire.services.frontend.media.stage_clock import MediaTimes, StageClock


class Hand:
    """A clock that is set by hand."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_without_items_there_are_no_times() -> None:
    assert StageClock(Hand()).times is None


def test_stages_of_one_item_follow_each_other() -> None:
    hand = Hand()
    clock = StageClock(hand)
    with clock.fetching():
        hand.now += 2
    hand.now += 10  # neither
    with clock.processing():
        hand.now += 3
        assert clock.times == MediaTimes(2, 3)
    hand.now += 10
    assert clock.times == MediaTimes(2, 3)


def test_items_at_the_same_time_are_counted_once_and_fetching_first() -> None:
    hand = Hand()
    clock = StageClock(hand)
    with clock.fetching():
        with clock.fetching(), clock.processing():
            hand.now += 4
        hand.now += 1
        with clock.processing():
            hand.now += 2
    with clock.processing(), clock.processing():
        hand.now += 5
    assert clock.times == MediaTimes(7, 5)


def test_a_failed_item_ends_its_stage() -> None:
    hand = Hand()
    clock = StageClock(hand)
    try:
        with clock.fetching():
            hand.now += 1
            raise ValueError
    except ValueError:
        hand.now += 1
    assert clock.times == MediaTimes(1, 0)
