"""Blocks fetched from another worker: sequences that wait, sequences that do not, and failures."""

from __future__ import annotations

import random

import pytest

from quire.services.scheduler.core.sequences.sequence import Sequence, SequenceStatus
from quire.services.scheduler.placement.peer_topology import MAX_FETCH_TICKS
from quire.shared.errors import Unavailable, to_proto
from quire.shared.pb.worker.v1.worker_pb2 import BlocksFetched
from tests.services.scheduler.placement.worker_pair import SIZE, WorkerPair
from tests.services.scheduler.reference_worker import oracle

RUNNING, BLOCKED = SequenceStatus.RUNNING, SequenceStatus.BLOCKED


def prompt(number: int, num_tokens: int = 40) -> list[int]:
    return [number + 1 for _ in range(num_tokens)]


@pytest.fixture
def pair() -> WorkerPair:
    """Worker a has computed a prompt."""
    made = WorkerPair()
    made.run(made.a, prompt(0))
    return made


def blocked(pair: WorkerPair, **fields: object) -> Sequence:
    sequence = pair.add(pair.b, prompt(0), **fields)
    pair.b.step()
    assert sequence.status is BLOCKED
    return sequence


def test_a_prompt_cached_on_another_worker_is_fetched(pair: WorkerPair) -> None:
    before = pair.b.worker.num_computed_tokens
    sequence = pair.run(pair.b, prompt(0))
    assert sequence.num_cached_tokens == 40
    assert pair.b.worker.num_computed_tokens - before == 2, "the last token of the prompt, and one of the answer"
    assert (pair.b.core.counts.fetches, pair.b.core.counts.blocks_from_others) == (1, 10)
    assert pair.is_at_rest()


def test_a_fetch_blocks_no_other_sequence_and_is_shared(pair: WorkerPair) -> None:
    first, second, other = blocked(pair), pair.add(pair.b, prompt(0)), pair.add(pair.b, prompt(7, 8))
    pair.b.step()
    assert (second.status, other.status) == (BLOCKED, RUNNING)
    assert pair.b.core.num_waiting == 2
    (order,) = pair.b.orders()
    pair.copy(pair.b, order)
    pair.b.core.on_fetch_done(order.fetch_id)
    pair.b.step()
    assert [first.num_cached_tokens, second.num_cached_tokens] == [40, 40]


def test_lent_blocks_are_held_until_the_fetch_ends(pair: WorkerPair) -> None:
    blocked(pair)
    (order,) = pair.b.orders()
    assert pair.a.core.use.used == len(order.blocks) == 10
    for number in range(1, 8):
        pair.add(pair.a, prompt(number))
        while pair.a.step():
            pass
    hashes = [pair.a.core.kv.pool.hash_of(block) for block in order.borrowed.loan.blocks]
    assert hashes == order.hashes
    pair.b.core.on_fetch_done(order.fetch_id, failed=True)
    assert pair.a.core.use.used == 0


def test_blocks_of_a_step_in_flight_can_be_lent() -> None:
    pair = WorkerPair(max_num_batched_tokens=16)
    pair.add(pair.a, prompt(0))
    first = pair.a.core.schedule(0)
    assert first is not None
    pair.add(pair.b, prompt(0))
    pair.b.step()
    (order,) = pair.b.orders()
    assert (order.borrowed.loan.after_step, len(order.blocks)) == (first.step_id, 16 // SIZE)


@pytest.mark.parametrize("way", ["failed", "lender gone", "too late"])
def test_failed_fetches_are_computed(pair: WorkerPair, way: str) -> None:
    sequence = blocked(pair)
    (order,) = pair.b.orders()
    if way == "failed":
        pair.b.core.on_fetch_done(order.fetch_id, failed=True)
        assert pair.b.core.counts.failed_fetches == 1
    elif way == "lender gone":
        pair.cluster.detach(pair.a.replica, lost=True)
    else:
        for _ in range(MAX_FETCH_TICKS + 1):
            pair.cluster.tick()
    assert pair.b.step()
    assert sequence.status is RUNNING
    assert sequence.num_cached_tokens == 0
    if way != "failed":  # its blocks stay held until the worker has reported the end
        assert pair.b.core.use.used == 20
        pair.b.core.on_fetch_done(order.fetch_id, failed=way == "lender gone")
    while pair.b.step():
        pass
    assert pair.b.core.use.used == 0


def test_loans_of_a_lost_borrower_end(pair: WorkerPair) -> None:
    sequence = blocked(pair)
    pair.cluster.detach(pair.b.replica, lost=False)
    assert pair.a.core.use.used == 0
    assert sequence.status is SequenceStatus.WAITING


def test_a_sequence_cancelled_while_waiting_is_not_resumed(pair: WorkerPair) -> None:
    sequence = blocked(pair)
    pair.b.core.cancel(sequence.key)
    assert pair.b.core.num_waiting == 0
    pair.carry()
    assert pair.is_at_rest()


def test_only_equal_layouts_are_peers_and_fetches_must_be_faster() -> None:
    pair = WorkerPair()
    pair.a.replica.hello.kv_transfer.layout = b"m" * 32
    pair.cluster.assignments.peer_topology.on_workers_changed()
    pair.run(pair.a, prompt(0))
    assert pair.run(pair.b, prompt(0)).num_cached_tokens == 0
    pair.a.replica.hello.kv_transfer.layout = pair.b.replica.hello.kv_transfer.layout
    pair.cluster.assignments.peer_topology.on_workers_changed()
    pair.run(pair.a, prompt(1))
    pair.b.core.estimate_prompt_s = lambda tokens: tokens * 1e-6  # type: ignore[method-assign]
    assert pair.run(pair.b, prompt(1)).num_cached_tokens == 0
    assert pair.b.core.counts.fetches == 0


def test_sequences_that_skip_the_cache_fetch_nothing(pair: WorkerPair) -> None:
    sequence = pair.add(pair.b, prompt(0), skip_reading_prefix_cache=True)
    pair.b.step()
    assert (sequence.status, sequence.num_cached_tokens) == (RUNNING, 0)


def test_placement_considers_fetchable_blocks() -> None:
    """40 tokens are cached on a, which has 30 others to compute: b fetches their KV in less time than that."""
    pair = WorkerPair()
    pair.run(pair.a, prompt(0))
    assert pair.where(pair.place(prompt(0))) == "a", "alone it finds all of it there"
    pair.settle()
    pair.add(pair.a, prompt(9, 30))
    assert pair.where(pair.place(prompt(0))) == "b"
    pair.settle()
    assert pair.b.core.counts.blocks_from_others == 10
    pair.add(pair.a, prompt(8, 30))
    pair.run(pair.a, prompt(1))
    pair.b.replica.links["a"].record_failure()
    pair.add(pair.a, prompt(7, 30))
    assert pair.where(pair.place(prompt(1))) == "a", "nothing comes from there"


def test_a_failing_link_is_skipped_for_a_while(pair: WorkerPair) -> None:
    blocked(pair)
    (order,) = pair.b.orders()
    failed = BlocksFetched(fetch_id=order.fetch_id, error=to_proto(Unavailable("no way there")))
    pair.b.replica.receive_fetched(failed)
    pair.settle()
    others = [[number] * 40 for number in range(20, 24)]
    for other in others:
        pair.run(pair.a, other)
    assert [pair.run(pair.b, other).num_cached_tokens for other in others] == [0, 0, 40, 40]


@pytest.mark.parametrize("seed", range(6))
def test_random_operations_match_the_oracle(seed: int) -> None:
    """Prompts with common prefixes on two small workers; fetches are late or fail, and sequences are cancelled."""
    rng = random.Random(seed)
    pair = WorkerPair(num_blocks=24, max_num_batched_tokens=24, max_steps_in_flight=1)
    stems = [[rng.randrange(50) for _ in range(32)] for _ in range(3)]
    late, sequences = [], []
    for _ in range(400):
        side = rng.choice(pair.sides)
        action = rng.random()
        if action < 0.15:
            cut = rng.randrange(8, 33)
            asked = rng.choice(stems)[:cut] + [rng.randrange(50) for _ in range(rng.randrange(4))]
            sequences.append((pair.add(side, asked, rng.randrange(1, 6)), asked))
        elif action < 0.2 and sequences:
            victim = rng.choice(sequences)[0]
            for owner in pair.sides:
                owner.core.cancel(victim.key)
        elif action < 0.5 and late:
            owner, order = late.pop(rng.randrange(len(late)))
            failed = rng.random() < 0.2
            if not failed:
                pair.copy(owner, order)
            owner.core.on_fetch_done(order.fetch_id, failed=failed)
        else:
            side.step()
        late += [(owner, order) for owner in pair.sides for order in owner.orders()]
        assert [owner.core.kv.num_unowned() for owner in pair.sides] == [0, 0]
    while late:
        owner, order = late.pop()
        pair.copy(owner, order)
        owner.core.on_fetch_done(order.fetch_id)
    pair.settle()
    assert pair.is_at_rest()
    assert sum(side.core.counts.fetches for side in pair.sides) > 3
    for sequence, asked in sequences:
        said = sequence.tokens.ids()[len(asked) :]
        assert said == oracle(asked, sequence.max_total_tokens, False)[: len(said)]
