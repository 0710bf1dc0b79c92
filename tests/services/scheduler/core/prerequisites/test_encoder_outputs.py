"""Sequences with media wait until the worker has encoded all of their items, and run like all others then."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import StepResult
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.media import MediaItem
from quire.services.scheduler.core.sequences.sequence import Sequence, WorkerLoss
from quire.shared.kv import block_hash
from tests.services.scheduler.conftest import make_sequence

NewCore = Callable[..., Core]
CAPACITY = 10
FAILURE = Failure("INVALID_ARGUMENT", "the picture cannot be fetched")


def name(letter: str) -> bytes:
    return letter.encode() * 32


def with_items(key: int, letters: str, size: int = 4, **fields: object) -> Sequence:
    """A sequence whose prompt has an item for each letter, of `size` embeddings."""
    items = tuple(MediaItem(name(letter), 1 + i * size, size, size, letter) for i, letter in enumerate(letters))
    return make_sequence(key, [key, *range(len(letters) * size + 1)], media=items, **fields)


def seeing(core: NewCore, **fields: object) -> Core:
    given = {"num_blocks": 100, **fields}
    return core(encoder_capacity=CAPACITY, max_num_batched_tokens=256, max_model_len=128, **given)


def orders(core: Core) -> str:
    """The orders since the last look: a letter for an item to encode, in capitals for one to release."""
    taken = core.encoder_outputs.take_orders()
    return "".join(
        (order.identifier[:1].decode() if order.item else order.identifier[:1].decode().upper()) for order in taken
    )


def run(core: Core) -> list[int]:
    """Plans and applies one step; returns the keys of its sequences."""
    plan = core.schedule(0)
    if plan is None:
        return []
    keys = core.steps_in_flight[0].keys.tolist()
    core.apply(StepResult(plan.step_id, np.full(len(keys), 7, dtype=np.int32)), now=0)
    return keys


def encoded(core: Core, letters: str, failure: Failure | None = None) -> None:
    for letter in letters:
        core.on_media_encoded(name(letter), failure)


def test_an_item_is_encoded_once_for_all_sequences_that_have_it(core: NewCore) -> None:
    c = seeing(core)
    for key in (1, 2):
        c.add(with_items(key, "a"))
    c.add(make_sequence(3, [3]))
    assert orders(c) == "a"
    assert run(c) == [3]
    encoded(c, "a")
    assert run(c) == [3, 1, 2]
    c.add(with_items(4, "a"))
    assert 4 in run(c)
    assert orders(c) == ""


def test_a_sequence_waits_for_the_last_of_its_items(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    assert orders(c) == "ab"
    encoded(c, "b")
    assert run(c) == []
    encoded(c, "a")
    assert run(c) == [1]


def test_an_item_that_occurs_twice_counts_once(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "aaaa"))
    assert orders(c) == "a"
    assert c.encoder_outputs.num_embeddings == 4
    encoded(c, "a")
    assert run(c) == [1]


def test_rows_without_users_stay_until_room_is_needed(core: NewCore) -> None:
    c = seeing(core)
    for key, letter in ((1, "a"), (2, "b")):
        c.add(with_items(key, letter))
        encoded(c, letter)
        run(c)
        c.cancel(key)
    assert (orders(c), c.encoder_outputs.num_embeddings) == ("ab", 8)
    c.add(with_items(3, "c"))
    assert orders(c) == "Ac"  # the oldest goes, before the new one is encoded
    c.add(with_items(4, "b"))
    assert 4 in run(c)


def test_rows_in_use_are_never_released_and_later_items_wait(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "c"))
    assert orders(c) == "ab"
    encoded(c, "ab")
    assert orders(c) == ""
    c.cancel(1)
    assert orders(c) == "Ac"
    encoded(c, "c")
    assert run(c) == [2]


def test_two_sequences_never_hold_what_the_other_one_needs(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "cd"))
    c.add(with_items(3, "a"))
    assert orders(c) == "ab"
    encoded(c, "ab")
    assert sorted(run(c)) == [1, 3]
    c.cancel(1)
    c.cancel(3)
    assert sorted(orders(c)) == ["A", "B", "c", "d"]
    encoded(c, "dc")
    assert run(c) == [2]


def test_sequences_that_share_items_with_one_that_is_gone_do_not_wait_for_each_other(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    encoded(c, "ab")
    c.add(with_items(2, "ac"))  # keeps a, and waits for the room of b
    c.add(with_items(3, "bd"))  # keeps b, and waits for the room of a
    assert orders(c) == "ab"
    assert run(c) == [1]
    assert orders(c) == "Bc"
    encoded(c, "c")
    assert run(c) == [1, 2]
    assert sorted(orders(c)) == ["A", "C", "b", "d"]
    encoded(c, "bd")
    assert 3 in run(c)


def test_a_failure_ends_every_sequence_with_the_item_and_is_tried_again(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "a"))
    c.add(with_items(3, "b"))
    encoded(c, "b")
    encoded(c, "a", FAILURE)
    ends = c.take_events().finished
    assert [(end.sequence.key, end.reason, end.failure) for end in ends] == [
        (1, Reason.ERROR, FAILURE),
        (2, Reason.ERROR, FAILURE),
    ]
    orders(c)
    assert run(c) == [3]
    c.add(with_items(4, "a"))
    assert orders(c) == "a"


def test_one_that_leaves_before_its_room_is_there_wants_none(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "cd"))
    c.cancel(2)
    c.add(with_items(3, "e", size=2))
    assert orders(c) == "abe"


def test_what_can_never_be_encoded_is_refused_at_once(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "abc"))
    (end,) = c.take_events().finished
    assert end.failure is not None
    assert "12 embeddings together; the worker keeps 10" in end.failure.message
    blind = core()
    blind.add(with_items(1, "a", size=1))
    (end,) = blind.take_events().finished
    assert end.failure is not None
    assert end.failure.code == "INVALID_ARGUMENT"
    assert end.failure.message.startswith("media: the worker takes no pictures")


def test_a_deadline_passes_while_a_picture_is_encoded(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a", deadline=5.0))
    c.schedule(6.0)
    (end,) = c.take_events().finished
    assert end.reason is Reason.DEADLINE
    encoded(c, "a")
    assert not c.has_work
    assert c.encoder_outputs.num_embeddings == 4


def test_a_lost_worker_takes_its_rows_along(core: NewCore) -> None:
    c, other = seeing(core), seeing(core)
    for key in (1, 2):
        c.add(with_items(key, "ab"))
    encoded(c, "a")
    for sequence in c.evacuate(WorkerLoss("w", 1)):
        other.add(sequence)
    assert c.num_waiting == 0
    assert orders(other) == "ab"
    encoded(other, "ab")
    assert run(other) == [1, 2]


def test_rows_are_free_once_the_step_that_completes_the_prompt_is_planned(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "c"))
    assert orders(c) == "ab"
    encoded(c, "ab")
    assert run(c) == [1]
    assert orders(c) == "Ac"  # sequence 1 still runs
    encoded(c, "c")
    assert run(c) == [1, 2]


def test_rows_stay_while_a_prompt_is_computed_in_chunks(core: NewCore) -> None:
    c = core(encoder_capacity=CAPACITY, num_blocks=100, max_num_batched_tokens=4, max_model_len=128)
    c.add(with_items(1, "ab"))
    c.add(with_items(2, "c"))
    assert orders(c) == "ab"
    encoded(c, "ab")
    for _ in range(2):  # 8 of its 10 tokens
        run(c)
        assert orders(c) == ""
    run(c)
    assert orders(c) == "Ac"


def test_a_preempted_sequence_waits_for_rows_that_are_gone(core: NewCore) -> None:
    c = seeing(core, enable_prefix_caching=False)
    c.add(with_items(1, "ab", max_tokens=50))
    encoded(c, "ab")
    run(c)
    c.add(with_items(2, "c", max_tokens=50))
    assert orders(c) == "abAc"
    encoded(c, "c")
    run(c)
    sequence = c.find(1)
    assert sequence is not None
    c.state.preempt(sequence.slot)
    assert orders(c) == "Ca"
    assert run(c) == [2]
    encoded(c, "a")
    assert sorted(run(c)) == [1, 2]


def test_a_failure_of_one_source_makes_the_worker_try_another(core: NewCore) -> None:
    c = seeing(core)
    first, second, third = (with_items(key, "a") for key in (1, 2, 3))
    second.media = (second.media[0]._replace(payload="elsewhere"),)
    for sequence in (first, second, third):
        c.add(sequence)
    assert [order.item.payload for order in c.encoder_outputs.take_orders() if order.item] == ["a"]
    encoded(c, "a", FAILURE)
    assert [end.sequence.key for end in c.take_events().finished] == [1, 3]
    assert [order.item.payload for order in c.encoder_outputs.take_orders() if order.item] == ["elsewhere"]
    encoded(c, "a")
    assert run(c) == [2]


def test_new_weights_make_the_worker_encode_again_what_is_in_use(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a", max_tokens=1))
    encoded(c, "a")
    run(c)
    c.add(with_items(2, "b"))
    encoded(c, "b")
    orders(c)
    c.reset_prefix_cache(preempt_running=True)
    assert orders(c) == "ABb"
    assert run(c) == []
    encoded(c, "b")
    assert run(c) == [2]


def test_rows_that_cross_a_change_of_weights_are_encoded_again(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a"))
    assert orders(c) == "a"
    c.reset_prefix_cache(preempt_running=True)
    encoded(c, "a")  # by the old weights, or by the new ones: the scheduler cannot know
    assert orders(c) == "Aa"
    assert run(c) == []
    encoded(c, "a")
    assert run(c) == [1]


def test_an_item_without_users_that_crosses_a_change_of_weights_is_dropped(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a"))
    c.cancel(1)
    c.reset_prefix_cache(preempt_running=True)
    encoded(c, "a")
    assert orders(c) == "aA"
    assert c.encoder_outputs.num_items == 0


def test_a_failure_that_crosses_a_change_of_weights_ends_its_sequence(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a"))
    c.reset_prefix_cache(preempt_running=True)
    encoded(c, "a", FAILURE)
    assert [end.failure for end in c.take_events().finished] == [FAILURE]
    c.add(with_items(2, "a"))
    assert orders(c) == "aa"
    encoded(c, "a")
    assert run(c) == [2]


class EncodingWorker:
    """Executes the orders about media, as a worker does: an item is encoded some time after its order, its answer
    arrives some time after that, and new weights drop the rows that are kept."""

    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        self.rows: set[bytes] = set()
        self._waiting: list[bytes] = []
        self._answers: list[tuple[bytes, Failure | None]] = []

    def receive(self, core: Core) -> None:
        for order in core.encoder_outputs.take_orders():
            if order.item is None:
                self.rows.discard(order.identifier)
            else:
                self._waiting.append(order.identifier)

    def encode(self) -> None:
        if self._waiting:
            identifier = self._waiting.pop(self._chance.randrange(len(self._waiting)))
            failure = FAILURE if self._chance.random() < 0.1 else None
            if failure is None:
                self.rows.add(identifier)
            self._answers.append((identifier, failure))

    def answer(self, core: Core) -> None:
        if self._answers:
            identifier, failure = self._answers.pop(self._chance.randrange(len(self._answers)))
            assert core.encoder_outputs.awaits(identifier)
            core.on_media_encoded(identifier, failure)

    def change_weights(self) -> None:
        self.rows.clear()


def run_with_rows(core: Core, worker: EncodingWorker) -> None:
    """Plans and applies a step, whose new sequences must find the rows of their items."""
    plan = core.schedule(0)
    if plan is None:
        return
    for admission in plan.admitted:
        assert all(item.identifier in worker.rows for item in admission.sequence.media)
    count = len(core.steps_in_flight[0].keys)
    core.apply(StepResult(plan.step_id, np.full(count, 7, dtype=np.int32)), now=0)


@pytest.mark.parametrize("seed", range(30))
def test_no_sequence_runs_without_rows_whenever_weights_change(core: NewCore, seed: int) -> None:
    chance, c = random.Random(seed), seeing(core, enable_prefix_caching=False)
    worker, live = EncodingWorker(chance), set[int]()
    for key in range(1, 500):
        match chance.randrange(6):
            case 0:
                letters = "".join(chance.choices("abcdef", k=chance.randrange(1, 3)))
                c.add(with_items(key, letters, max_tokens=chance.randrange(1, 4)))
                live.add(key)
            case 1 if live:
                c.cancel(chance.choice(sorted(live)))
            case 2:
                worker.answer(c)
            case 3:
                worker.encode()
            case 4 if chance.random() < 0.3:
                c.reset_prefix_cache(preempt_running=True)  # no order is sent until the weights have changed
                if chance.random() < 0.5:
                    worker.answer(c)
                worker.change_weights()
            case _:
                run_with_rows(c, worker)
        worker.receive(c)
        live -= {end.sequence.key for end in c.take_events().finished}
        c.encoder_outputs.check_invariant()
    for _ in range(1000):
        for act in (worker.encode, lambda: worker.answer(c), lambda: run_with_rows(c, worker)):
            act()
            worker.receive(c)
        live -= {end.sequence.key for end in c.take_events().finished}
        if not live:
            break
    assert not live
    assert not c.has_work


@pytest.mark.parametrize("seed", range(20))
def test_random_operations_leave_nothing_blocked_and_nothing_over(core: NewCore, seed: int) -> None:
    chance, c = random.Random(seed), seeing(core)
    keys = iter(range(1, 10_000))
    live: set[int] = set()
    asked: list[str] = []
    for _ in range(300):
        match chance.randrange(5):
            case 0:
                key, letters = next(keys), "".join(chance.choices("abcdef", k=chance.randrange(1, 3)))
                c.add(with_items(key, letters, max_tokens=chance.randrange(1, 4)))
                live.add(key)
            case 1 if live:
                c.cancel(chance.choice(sorted(live)))
            case 2 if asked:
                letter = asked.pop(chance.randrange(len(asked)))
                if c.encoder_outputs.awaits(name(letter)):
                    encoded(c, letter, FAILURE if chance.random() < 0.1 else None)
            case _:
                run(c)
        asked += [letter for letter in orders(c) if letter.islower()]
        live -= {end.sequence.key for end in c.take_events().finished}
        c.encoder_outputs.check_invariant()
    for _ in range(1000):
        for letter in asked:
            if c.encoder_outputs.awaits(name(letter)):
                encoded(c, letter)
        run(c)
        asked = [letter for letter in orders(c) if letter.islower()]
        live -= {end.sequence.key for end in c.take_events().finished}
        if not live:
            break
    assert not live
    assert not c.has_work


def test_blocks_that_output_completes_name_the_items_that_reach_into_them(core: NewCore) -> None:
    c = seeing(core, enable_prefix_caching=True, block_size=16)
    sequence = with_items(1, "a", size=10, max_tokens=30)
    c.add(sequence)
    encoded(c, "a")
    while c.has_work:
        run(c)
    tokens = bytes(sequence.tokens)
    expected = block_hash.chain_with_media(sequence.root_hash, tokens, 16, sequence.media)
    assert len(expected) == 2
    assert sequence.block_hashes == expected
    assert sequence.block_hashes[0] != block_hash.chain(sequence.root_hash, tokens, 16)[0]


def started_times(core: Core, now: float) -> dict[int, tuple[float, float]]:
    """Plans one step; returns by sequence the time since it was queued, and that in which its media were encoded."""
    core.schedule(now)
    return {start.sequence.key: (start.queued_s, start.encode_s) for start in core.take_events().started}


def test_the_time_of_encoding_is_reported_with_the_start(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "ab", queued_at=10.0))
    c.add(with_items(2, "b", queued_at=14.5))
    c.add(make_sequence(3, [3], queued_at=10.0))
    for letter, span in (("a", (12.0, 14.0)), ("b", (13.0, 16.0))):  # a second of it is that of the other item
        c.encoder_outputs.count_time(name(letter), span)
        encoded(c, letter)
    assert started_times(c, 20.0) == {1: (10.0, 4.0), 2: (5.5, 1.5), 3: (10.0, 0.0)}


def test_a_kept_item_takes_no_time(core: NewCore) -> None:
    c = seeing(core)
    c.add(with_items(1, "a"))
    c.encoder_outputs.count_time(name("a"), (1.0, 3.0))
    encoded(c, "a")
    run(c)
    c.take_events()
    c.add(with_items(2, "a", queued_at=5.0))
    assert started_times(c, 6.0) == {2: (1.0, 0.0)}


def with_cached_prefix(core: NewCore, num_blocks: int) -> Core:
    """A core whose prefix cache has the prompt of with_items(1, "ab"), and that keeps rows of other items only."""
    c = seeing(core, block_size=2, num_blocks=num_blocks)
    for key, letters in ((1, "ab"), (2, "cd")):
        c.add(with_items(key, letters, block_size=2, max_tokens=1))
        encoded(c, letters)
        assert run(c) == [key]
    assert orders(c) == "abAcBd"
    return c


def test_items_in_the_prefix_cache_are_not_encoded_again(core: NewCore) -> None:
    c = with_cached_prefix(core, num_blocks=100)
    c.add(with_items(1, "ab", block_size=2, max_tokens=1))
    assert orders(c) == ""
    assert run(c) == [1]
    c.check_invariant()


def test_items_whose_blocks_are_evicted_before_admission_are_encoded_then(core: NewCore) -> None:
    c = with_cached_prefix(core, num_blocks=13)
    c.add(make_sequence(3, [*range(50, 70)], block_size=2, max_tokens=1))
    c.add(with_items(1, "ab", block_size=2, max_tokens=1))
    assert orders(c) == ""
    assert run(c) == [3]
    assert run(c) == []
    assert orders(c) in {"abCD", "CDab", "CaDb", "CabD"}
    encoded(c, "ab")
    assert run(c) == [1]
    c.check_invariant()
