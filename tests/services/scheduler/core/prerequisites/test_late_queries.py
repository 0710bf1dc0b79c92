"""Late interaction: a query is computed once, before its documents, on their worker."""

from __future__ import annotations

import hashlib
import random
import re
from collections import Counter

import numpy as np
import pytest

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import Events, StepPlan, StepResult
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import LateQuery, WorkerLoss
from quire.services.scheduler.sessions.scheduling_policies import find_policy
from quire.shared.columns import i32_bytes
from quire.shared.kv.kv_specs import NOTHING
from tests.services.scheduler.conftest import make_limits, make_sequence

NO_TOKENS = np.zeros(0, dtype=np.int32)
SCORE = b"\0\0\0\0"


def encoder(**fields: object) -> Core:
    sizes = {"num_blocks": 2, "max_model_len": 100, "max_num_batched_tokens": 100, "num_query_vectors": 100}
    return Core(make_limits(kv_specs=(NOTHING,), **(sizes | fields)))


def decoder(**fields: object) -> Core:
    sizes = {"max_model_len": 100, "max_num_batched_tokens": 20, "num_query_vectors": 100}
    return Core(make_limits(**(sizes | fields)))


def query(word: int, length: int = 10) -> LateQuery:
    tokens = i32_bytes([word] * length)
    return LateQuery(hashlib.sha256(tokens).digest(), tokens)


def read(core: Core, key: int, asked: LateQuery, length: int = 20, **fields: object) -> None:
    values = {"skip_reading_prefix_cache": True, **fields}
    core.add(make_sequence(key, [key % 40] * length, 0, samples_nothing=True, query=asked, **values))


class CheckedCore:
    """A worker's cache of queries: checks that every document finds its query, and that the capacity suffices."""

    def __init__(self, core: Core) -> None:
        self.core = core
        self.expected: Counter[bytes] = Counter()  # tokens by name, from the admission on
        self.kept: set[bytes] = set()
        self.computed: list[bytes] = []
        self.slots: dict[int, tuple[LateQuery, bool]] = {}

    def launch(self) -> StepPlan | None:
        plan = self.core.schedule(0)
        if plan is None:
            return None
        for name in plan.dropped_queries:
            self.kept.discard(name)
            self.expected.pop(name, None)
        for slot in plan.released_slots:
            asked, is_query = self.slots.pop(slot, (None, False))
            if asked is not None and is_query and asked.name not in self.kept:
                self.expected.pop(asked.name, None)
        for admission in plan.admitted:
            sequence = admission.sequence
            if sequence.query is not None:
                self.slots[admission.slot] = (sequence.query, sequence.is_query)
                if sequence.is_query:
                    self.expected[sequence.query.name] = sequence.query.num_tokens
        assert self.expected.total() <= self.core.limits.num_query_vectors
        late = self.core.steps_in_flight[-1].late_queries
        for slot in (slot for slot, is_query in late.items() if is_query):
            self.kept.add(self.slots[slot][0].name)
            self.computed.append(self.slots[slot][0].name)
        for slot in (slot for slot, is_query in late.items() if not is_query):
            assert self.slots[slot][0].name in self.kept
        return plan

    def finish(self, failures: list[tuple[int, Failure]] | None = None) -> Events:
        """Applies the oldest step in flight."""
        flight = self.core.steps_in_flight[0]
        told = {slot: SCORE for slot in flight.pooled_keys if not flight.late_queries.get(slot, False)}
        tokens = np.zeros(len(flight.slots), dtype=np.int32)
        self.core.apply(StepResult(flight.step_id, tokens, failures=failures or [], pooled=told), 0)
        return self.core.take_events()

    def run(self) -> list[int]:
        """Runs until nothing is left; returns the keys of the documents with a score."""
        scored: list[int] = []
        while self.core.has_work:
            self.launch()
            events = self.finish()
            assert [end.reason for end in events.finished] == [Reason.STOP] * len(events.finished)
            scored += [pooled.sequence.key for pooled in events.pooled]
        return scored


def test_a_query_and_its_documents_run_in_one_step() -> None:
    core = encoder()
    for key in range(3):
        read(core, key, query(7))
    worker = CheckedCore(core)
    plan = worker.launch()
    assert plan is not None
    assert [admission.sequence.is_query for admission in plan.admitted] == [True, False, False, False]
    events = worker.finish()
    assert [pooled.sequence.key for pooled in events.pooled] == [0, 1, 2]
    assert sorted(end.sequence.key for end in events.finished) == [0, 1, 2]
    assert [started.sequence.key for started in events.started] == [0, 1, 2]
    assert not core.has_work


def test_a_cached_query_is_not_computed_again() -> None:
    core = encoder()
    worker = CheckedCore(core)
    for key in range(3):
        read(core, key, query(7))
        assert worker.run() == [key]
    read(core, 3, query(8))
    worker.run()
    assert worker.computed == [query(7).name, query(8).name]
    assert (core.counts.compared_documents, core.counts.query_hits) == (4, 2)


def test_a_query_of_several_chunks_precedes_its_documents() -> None:
    core = decoder()
    read(core, 0, query(7, 45))
    core.add(make_sequence(1, [1, 2, 3], 4))  # continues concurrently
    worker = CheckedCore(core)
    plans = [worker.launch()]
    while 0 not in (key := [a.sequence.key for plan in plans if plan for a in plan.admitted]):
        worker.finish()
        plans.append(worker.launch())
    assert len(plans) == 4
    assert key[-1] == 0
    while core.has_work:
        worker.finish() if core.steps_in_flight else worker.launch()
    assert worker.computed == [query(7, 45).name]


def test_a_query_is_as_urgent_as_its_most_urgent_document() -> None:
    core = decoder(policy=find_policy("priority"), max_num_seqs=1)
    read(core, 0, query(7), priority=9)
    for key in (1, 2):
        core.add(make_sequence(key, [1, 2, 3], 2, priority=5))
    read(core, 3, query(7), priority=0)
    worker, order = CheckedCore(core), []
    while core.has_work:
        plan = worker.launch()
        order += [] if plan is None else [admission.sequence.key for admission in plan.admitted]
        worker.finish()
    assert [key if key < 4 else "query" for key in order] == ["query", 3, 1, 2, 0]


def test_the_least_recently_used_idle_query_is_evicted_first() -> None:
    core = encoder(num_query_vectors=25)
    worker = CheckedCore(core)
    for key, word in enumerate([1, 2, 1, 3, 1, 2]):  # 3 takes the place of 2, and 2 that of 3
        read(core, key, query(word))
        worker.run()
    assert worker.computed == [query(word).name for word in (1, 2, 3, 2)]
    assert core.queries.num_vectors == 20


def test_queries_without_capacity_wait_in_order() -> None:
    core = encoder(num_query_vectors=15, max_num_batched_tokens=400, max_num_seqs=8)
    for key in range(12):
        read(core, key, query(key % 4))
    worker = CheckedCore(core)
    assert worker.run() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert worker.computed == [query(word).name for word in range(4)]


def test_a_query_without_documents_is_cancelled() -> None:
    core = decoder()
    read(core, 0, query(7, 60))
    read(core, 1, query(8, 50))  # waits for a place
    worker = CheckedCore(core)
    worker.launch()  # a chunk of the first
    core.cancel(0)
    assert len(core.queries) == 1
    core.cancel(1)
    assert not core.queries
    assert not core.has_work
    worker.finish()
    assert [end.reason for end in core.take_events().finished] == []


def test_documents_of_a_failed_query_end_with_its_error() -> None:
    core = encoder()
    for key in range(2):
        read(core, key, query(7))
    read(core, 2, query(8))
    worker = CheckedCore(core)
    worker.launch()
    slots = {
        worker.slots[slot][0].name: slot for slot, is_query in core.steps_in_flight[0].late_queries.items() if is_query
    }
    of_documents = [slot for slot, is_query in core.steps_in_flight[0].late_queries.items() if not is_query]
    lacking = [(slot, Failure("FAILED_PRECONDITION", "no vectors")) for slot in of_documents[:2]]
    events = worker.finish([*lacking, (slots[query(7).name], Failure("INTERNAL", "broken"))])
    failures = {end.sequence.key: end.failure.message for end in events.finished if end.failure is not None}
    assert failures == {0: "broken", 1: "broken"}
    assert [pooled.sequence.key for pooled in events.pooled] == [2]
    read(core, 3, query(7))
    worker.kept.discard(query(7).name)
    worker.expected.pop(query(7).name)
    assert worker.run() == [3]


def test_documents_of_a_lost_worker_compute_their_query_elsewhere() -> None:
    first, second = encoder(), encoder()
    for key in range(3):
        read(first, key, query(7), 60)
    CheckedCore(first).launch()  # with the first document
    moved = first.evacuate(WorkerLoss("w", 1))
    assert [(document.key, len(document.losses)) for document in moved] == [(0, 1), (1, 0), (2, 0)]
    assert not first.state.sequences
    for document in moved:
        second.add(document)
    worker = CheckedCore(second)
    assert worker.run() == [0, 1, 2]
    assert worker.computed == [query(7).name]


def test_losses_of_a_query_count_for_its_documents() -> None:
    moved = None
    for losses in range(3):
        core = decoder()
        if moved is None:
            read(core, 0, query(7, 60))
        for document in moved or []:
            core.add(document)
        CheckedCore(core).launch()  # a chunk of the query
        moved = core.evacuate(WorkerLoss("w", losses))
        assert [len(document.losses) for document in moved] == [losses + 1]


def test_documents_without_a_slot_leave_a_draining_worker() -> None:
    core = encoder(max_num_batched_tokens=40)
    for key in range(4):
        read(core, key, query(7 + key // 3))
    worker = CheckedCore(core)
    worker.launch()
    assert [document.key for document in core.evacuate_waiting()] == [1, 2, 3]
    assert [pooled.sequence.key for pooled in worker.finish().pooled] == [0]
    assert not core.has_work


def test_queries_are_computed_again_after_a_cache_reset() -> None:
    core = decoder(max_num_batched_tokens=40)
    read(core, 0, query(7))
    worker = CheckedCore(core)
    worker.run()
    read(core, 1, query(7), 60)
    worker.launch()  # its first chunk
    worker.finish()
    core.reset_prefix_cache(preempt_running=True)
    worker.kept.clear()
    worker.expected.clear()
    assert worker.run() == [1]
    assert worker.computed == [query(7).name] * 2


@pytest.mark.parametrize(
    ("fields", "length", "text"),
    [
        ({"num_query_vectors": 0}, 10, "does not support late interaction"),
        ({"num_query_vectors": 9}, 10, r"length 10\) exceeds the worker's query cache of 9 vectors"),
        ({"num_query_vectors": 500}, 101, "longer than the maximum model length of 100"),
    ],
)
def test_a_query_that_can_never_fit_is_refused(fields: dict[str, object], length: int, text: str) -> None:
    core = encoder(**fields)
    read(core, 0, query(7, length))
    (finished,) = core.take_events().finished
    assert finished.failure is not None
    assert finished.failure.code == "INVALID_ARGUMENT"
    assert re.search(text, finished.failure.message)


@pytest.mark.parametrize("policy", ["fcfs", "priority", "fair"])
@pytest.mark.parametrize("make", [encoder, decoder])
def test_random_operations_release_everything(make: type[Core], policy: str) -> None:
    """Queries of all lengths among other sequences, little capacity, several steps in flight, cancellations, and resets
    now and then."""
    numbers = random.Random(policy)
    core = make(
        policy=find_policy(policy),
        max_steps_in_flight=2,
        max_num_seqs=6,
        num_query_vectors=60,
        max_num_batched_tokens=80,
    )
    worker = CheckedCore(core)
    ended: set[int] = set()

    def finish() -> None:
        ended.update(end.sequence.key for end in worker.finish().finished)

    for key in range(400):
        asked = query(numbers.randint(0, 9), numbers.choice((5, 20, 50)))
        fields = {"tenant": numbers.choice("ab"), "priority": numbers.randint(0, 3) if policy == "priority" else 0}
        if make is decoder and numbers.random() < 0.3:
            core.add(make_sequence(key, [key % 40] * numbers.randint(1, 30), 3, **fields))
        else:
            read(core, key, asked, numbers.randint(1, 79), **fields)
        for _ in range(numbers.randint(0, 3)):
            worker.launch()
        if numbers.random() < 0.2:
            core.cancel(numbers.randint(0, key))
        while core.steps_in_flight and numbers.random() < 0.8:
            finish()
        if numbers.random() < 0.02:
            while core.steps_in_flight:
                finish()
            core.reset_prefix_cache(preempt_running=True)
            worker.kept.clear()
            worker.expected.clear()
            worker.slots = {slot: found for slot, found in worker.slots.items() if core.running.live[slot]}
        ended.update(end.sequence.key for end in core.take_events().finished)
    while core.has_work or core.steps_in_flight:
        worker.launch()
        finish()
    assert ended == set(range(400))
    assert (core.num_waiting_tokens, core.num_waiting, core.queries.num_blocked) == (0, 0, 0)
    assert core.kv.idle
    assert core.queries.num_vectors <= 60


@pytest.mark.parametrize("way", ["cancelled", "failed", "cancelled when it is there"])
def test_a_waiting_query_gets_the_capacity_of_an_unwanted_one(way: str) -> None:
    core = decoder(num_query_vectors=12)
    first, second = query(1, 10), query(2, 10)
    read(core, 1, first)
    read(core, 2, second)
    plan = core.schedule(0)
    assert plan is not None
    assert [admission.sequence.is_query for admission in plan.admitted] == [True, False]
    if way == "cancelled":
        core.cancel(1)
    failures = [(0, Failure("INTERNAL", "NaN"))] if way == "failed" else []
    core.apply(StepResult(plan.step_id, NO_TOKENS, failures=failures, pooled={0: SCORE, 1: SCORE}), 0)
    if way == "cancelled when it is there":
        core.cancel(1)
    later = core.schedule(1)
    assert later is not None, "the second query is computed"
    assert [admission.sequence.query for admission in later.admitted if admission.sequence.is_query] == [second]
