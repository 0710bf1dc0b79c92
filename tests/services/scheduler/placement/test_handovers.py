"""Prompts that one worker computes and another goes on with: the same tokens, whatever happens on the way."""

from __future__ import annotations

import random

import pytest

from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import SampleGroup, Sequence, SequenceStatus
from quire.services.scheduler.placement.roles import MAX_LOAD_RATIO, should_use_prefill_worker
from tests.services.scheduler.placement.worker_pair import SIZE, WorkerPair
from tests.services.scheduler.reference_worker import oracle

RUNNING, FINISHED = SequenceStatus.RUNNING, SequenceStatus.FINISHED
LONG = [7, 3] * 20
SHORT = [7, 3] * 4


@pytest.fixture
def pair() -> WorkerPair:
    """a computes prompts, in chunks, and b goes on with them."""
    return WorkerPair(("prefill", "decode"), max_num_batched_tokens=16)


def said(sequence: Sequence) -> list[int]:
    return sequence.tokens.ids()[sequence.num_prompt_tokens :]


def right(sequence: Sequence) -> list[int]:
    return oracle(sequence.tokens.ids()[: sequence.num_prompt_tokens], sequence.max_total_tokens, False)


def until_moved(pair: WorkerPair, sequence: Sequence) -> None:
    while pair.where(sequence) == "a":
        assert pair.a.step()
        pair.carry()


def test_blocks_go_over_as_chunks_are_computed_and_the_sequence_behind_them(pair: WorkerPair) -> None:
    sequence = pair.place(LONG, 12)
    sent = []
    while pair.where(sequence) == "a":
        assert pair.a.step()
        for order in pair.b.orders():
            sent.append((order.borrowed.loan.after_step, len(order.blocks)))
            pair.copy(pair.b, order)
            pair.b.core.on_fetch_done(order.fetch_id)
            pair.b.watched()
    assert sent[:3] == [(1, 4), (2, 4), (3, 2)], "each of them behind the step that fills them"
    before = pair.b.worker.num_computed_tokens
    assert pair.b.step()
    assert sequence.status is RUNNING
    assert pair.b.worker.num_computed_tokens - before <= SIZE + 1
    pair.settle()
    assert said(sequence) == right(sequence)
    assert pair.is_at_rest()


def test_short_prompts_go_where_they_are_decoded(pair: WorkerPair) -> None:
    assert pair.where(pair.place(SHORT)) == "b"
    assert pair.where(pair.place(LONG)) == "a"


def test_a_prompt_that_the_decoder_has_cached_goes_there(pair: WorkerPair) -> None:
    pair.place(LONG)
    pair.settle()
    assert pair.where(pair.place([*LONG, 5])) == "b"


def test_prefill_workers_with_too_much_to_do_leave_prompts_to_decoders() -> None:
    def goes(prefill: int, decoder: int = 100, uncached: int = 100) -> bool:
        return should_use_prefill_worker(uncached=uncached, decoder_work=decoder, prefill_work=prefill, threshold=50)

    assert goes(100 * MAX_LOAD_RATIO)
    assert not goes(100 * MAX_LOAD_RATIO + 1)
    assert goes(100 * MAX_LOAD_RATIO + 1, decoder=101)
    assert not goes(100, uncached=49)


@pytest.mark.parametrize(
    "fields",
    [
        {"sample_group": SampleGroup()},
        {"samples_nothing": True},
        {"prompt_logprobs_from": 1},
        {"skip_reading_prefix_cache": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_cannot_move_stays_with_one_worker(pair: WorkerPair, fields: dict[str, object]) -> None:
    sequence = pair.place(LONG, **fields)
    assert pair.where(sequence) == "b" or sequence.samples_nothing
    pair.settle()
    assert len(pair.cluster.assignments.handovers) == 0


def test_it_goes_on_where_it_is_until_there_is_room() -> None:
    pair = WorkerPair(("prefill", "decode"), num_blocks=200, max_num_batched_tokens=16)
    crowd = [pair.place(SHORT, 40) for _ in range(8)]
    while pair.b.core.running.num_free_slots:
        pair.b.step()
    sequence = pair.place(LONG, 20)
    for _ in range(10):
        pair.a.step()
        pair.carry()
    assert pair.where(sequence) == "a"
    assert sequence.num_tokens > len(LONG) + 2
    pair.cluster.cancel(0, [], Reason.CANCELLED)
    for other in crowd:
        pair.b.core.cancel(other.key)
    pair.b.step()
    until_moved(pair, sequence)
    pair.settle()
    assert said(sequence) == right(sequence)
    assert pair.is_at_rest()


def test_blocks_that_do_not_come_are_computed_by_the_decoder(pair: WorkerPair) -> None:
    sequence = pair.place(LONG, 12)
    while pair.where(sequence) == "a":
        assert pair.a.step()
        pair.carry(failed=True)
    pair.settle()
    assert said(sequence) == right(sequence)
    assert pair.b.core.counts.failed_fetches >= 2
    assert pair.is_at_rest()


@pytest.mark.parametrize("steps", range(1, 6))
@pytest.mark.parametrize("gone", ["a", "b"])
def test_either_may_be_lost_at_any_time(gone: str, steps: int) -> None:
    pair = WorkerPair(("prefill", "decode"), max_num_batched_tokens=16)
    sequence = pair.place(LONG, 12)
    for step in range(steps):
        pair.a.step()
        if step % 2:
            pair.carry()
    lost, left = (pair.a, pair.b) if gone == "a" else (pair.b, pair.a)
    pair.cluster.detach(lost.replica, lost=True)
    for order in left.orders():
        left.core.on_fetch_done(order.fetch_id, failed=True)
    while sequence.status is not FINISHED:
        if not left.step():
            for fetch in list(left.core.peer_blocks.orders_under_way() if left.core.peer_blocks else ()):
                left.core.on_fetch_done(fetch.fetch_id, failed=True)
    assert said(sequence) == right(sequence)
    for fetch in list(left.core.peer_blocks.orders_under_way() if left.core.peer_blocks else ()):
        left.core.on_fetch_done(fetch.fetch_id, failed=True)
    left.watched()
    assert (left.core.use.used, left.core.kv.num_unowned(), len(pair.cluster.assignments.handovers)) == (0, 0, 0)


@pytest.mark.parametrize("steps", range(7))
def test_a_cancellation_leaves_nothing_behind(pair: WorkerPair, steps: int) -> None:
    sequence = pair.place(LONG, 12)
    for step in range(steps):
        for side in pair.sides:
            side.step()
        if step != 2:
            pair.carry()
    for side in pair.sides:
        side.core.cancel(sequence.key)
    pair.settle()
    pair.settle()
    assert pair.is_at_rest()
    assert len(pair.cluster.assignments.handovers) == 0


def test_a_reset_of_the_cache_takes_what_is_kept(pair: WorkerPair) -> None:
    sequence = pair.place(LONG, 12)
    for _ in range(2):
        pair.a.step()
        pair.carry()
    assert pair.b.core.use.used > 0
    assert pair.b.core.reset_prefix_cache() == 8
    pair.settle()
    assert said(sequence) == right(sequence)
    assert pair.is_at_rest()


def test_what_comes_behind_a_reset_is_kept_and_let_go_again(pair: WorkerPair) -> None:
    sequence = pair.place(LONG, 12)
    pair.a.step()
    pair.carry()
    assert pair.b.core.reset_prefix_cache() == 4
    until_moved(pair, sequence)
    pair.settle()
    assert said(sequence) == right(sequence)
    assert pair.is_at_rest()
    assert pair.b.core.reset_prefix_cache() is not None


@pytest.mark.parametrize(("roles", "where"), [(("decode", "decode"), "ab"), (("prefill", "prefill"), "ab")])
def test_whoever_is_there_does_all_of_it(roles: tuple[str, str], where: str) -> None:
    pair = WorkerPair(roles, max_num_batched_tokens=16)
    sequence = pair.place(LONG)
    assert pair.where(sequence) in where
    pair.settle()
    assert said(sequence) == right(sequence)
    missing = {"decode": "prefill", "prefill": "decode"}[roles[0]]
    registry = pair.metrics.registry
    assert registry.get_sample_value("quire_scheduler_role_missing", {"role": missing}) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_lives_say_what_the_oracle_says(seed: int) -> None:
    """Small workers that preempt; fetches are late, fail; sequences are cancelled."""
    rng = random.Random(seed)
    pair = WorkerPair(("prefill", "decode"), num_blocks=30, max_num_batched_tokens=16)
    late, sequences = [], []
    for _ in range(500):
        side = rng.choice(pair.sides)
        action = rng.random()
        if action < 0.1:
            sequences.append(pair.place([rng.randrange(50) for _ in range(rng.randrange(4, 40))], rng.randrange(1, 16)))
        elif action < 0.12 and sequences:
            victim = rng.choice(sequences)
            for owner in pair.sides:
                owner.core.cancel(victim.key)
        elif action < 0.5 and late:
            owner, order = late.pop(rng.randrange(len(late)))
            failed = rng.random() < 0.2
            if not failed:
                pair.copy(owner, order)
            owner.core.on_fetch_done(order.fetch_id, failed=failed)
            owner.watched()
        else:
            side.step()
        late += [(owner, order) for owner in pair.sides for order in owner.orders()]
        assert [owner.core.kv.num_unowned() for owner in pair.sides] == [0, 0]
    while late:
        owner, order = late.pop()
        pair.copy(owner, order)
        owner.core.on_fetch_done(order.fetch_id)
    pair.settle()
    for side in pair.sides:
        side.watched()
    assert pair.is_at_rest()
    assert len(pair.cluster.assignments.handovers) == 0
    assert pair.metrics.registry.get_sample_value("quire_scheduler_handovers_total", {"outcome": "done"}) > 3
    for sequence in sequences:
        assert said(sequence) == right(sequence)[: len(said(sequence))]
