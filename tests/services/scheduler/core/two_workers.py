"""Two cores with reference workers, and everything that sequences may wait for: grammars, queries, siblings, blocks
from host memory, from disk and from the other worker.

Each operation is one message or one decision of a scheduler; a test performs them in a random order. The driver checks
after each one that nothing leaks, and keeps a digest of everything that the workers are sent.
"""

from __future__ import annotations

import hashlib
import random
from collections import deque
from collections.abc import Sequence as Blocks
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from quire.services.scheduler.core.beam.beams import TOO_FEW_BLOCKS
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.counts import CoreCounts
from quire.services.scheduler.core.limits import CoreLimits
from quire.services.scheduler.core.plan import SequenceFinished, StepPlan, StepResult
from quire.services.scheduler.core.prerequisites.peer_blocks import MIN_BLOCKS, BorrowedBlocks, FetchOrder
from quire.services.scheduler.core.sequences.ending import Failure, Reason
from quire.services.scheduler.core.sequences.sequence import (
    LateQuery,
    SampleGroup,
    Sequence,
    SequenceStatus,
    WorkerLoss,
)
from quire.services.scheduler.core.transfers.orders import DiskOrder, TransferOrder
from quire.services.scheduler.placement.roles import can_be_handed_over
from quire.services.scheduler.replicas.codec import encode_order, encode_plan, encode_transfer
from quire.services.scheduler.values.payload import Payload
from quire.shared.columns import i32_bytes
from tests.services.scheduler.conftest import UnlimitedForecast, make_sequence
from tests.services.scheduler.core.beam.test_beams import exhaustive, search
from tests.services.scheduler.reference_worker import EOS, ReferenceWorker, digest, oracle

BROKEN = Failure("INTERNAL", "the worker could not do it")
GRAMMARS = [bytes([number]) * 32 for number in range(4)]
QUERIES = [i32_bytes([number] * (3 + 2 * number)) for number in range(5)]


@dataclass
class Client:
    """Expectations of the owner of one sequence, and its received events."""

    prompt: list[int]
    limit: int
    eos: bool = False
    is_scored: bool = False  # it wants a vector and no tokens
    may_fail: bool = False  # it needs a grammar or a query, which a worker may fail to prepare
    root: Sequence | None = None  # of a beam search
    found: list[int] = field(default_factory=list)  # by that search, if nothing ends it early
    tokens: list[int] = field(default_factory=list)
    vector: bytes = b""
    end: SequenceFinished | None = None


class Worker:
    """One attachment: a core, a reference worker, and the messages between them."""

    def __init__(self, limits: CoreLimits, seed: int) -> None:
        self.core = Core(limits)
        if seed % 2:
            self.core.state.forecast = UnlimitedForecast()  # blocks run out all the time
        self.paper = ReferenceWorker(limits, seed)
        self.results: deque[StepResult] = deque()
        self.transfers: deque[TransferOrder] = deque()
        self.on_disk: list[DiskOrder] = []
        self.fetches: list[FetchOrder] = []
        self.preparing: list[bytes] = []  # grammars
        self.grammars: set[bytes] = set()
        self.vectors: set[bytes] = set()  # of queries, by name
        self.failing: set[bytes] = set()  # queries whose step has failed, or will


class OtherWorker:
    """The other worker, as `borrower` sees it."""

    def __init__(self, cluster: TwoWorkers, borrower: Worker) -> None:
        self._cluster, self._borrower = cluster, borrower

    def borrow(self, hashes: Blocks[bytes], start: int, most: int) -> BorrowedBlocks | None:
        lender = self._cluster.other(self._borrower)
        lent = lender.core.peer_blocks
        count = 0 if lent is None else lent.num_found(hashes, start, most)
        if lent is None or count < MIN_BLOCKS:
            return None
        loan = lent.lend(hashes, start, count)
        return BorrowedBlocks(lender, loan, partial(lent.end_loan, loan))


class TwoWorkers:
    """A scheduler's view of two workers, with results that stay in flight for as long as the test likes."""

    def __init__(self, limits: CoreLimits, seed: int) -> None:
        self.random = random.Random(seed)
        self.limits, self._seed = limits, seed
        self.sent = hashlib.sha256()  # of every message to a worker
        self.clients: dict[int, Client] = {}
        self.now = 0.0
        self.counts: list[CoreCounts] = []  # of all attachments
        self._num_attached = 0
        self.workers: list[Worker] = []
        for _ in range(2):
            self.workers.append(self._attach())
        self._shared = [[self.random.randrange(40) for _ in range(60)] for _ in range(3)]

    def _attach(self) -> Worker:
        self._num_attached += 1
        worker = Worker(self.limits, self._seed + self._num_attached)
        self.counts.append(worker.core.counts)
        if worker.core.peer_blocks is not None:
            worker.core.peer_blocks.lenders = OtherWorker(self, worker)
        return worker

    def other(self, worker: Worker) -> Worker:
        return self.workers[1 - self.workers.index(worker)]

    def _any(self) -> Worker:
        return self.random.choice(self.workers)

    # Sequences come.

    def add(self) -> None:
        head = self.random.choice(self._shared)[: self.random.randrange(60)]
        prompt = head + [self.random.randrange(40) for _ in range(self.random.randrange(1, 30))]
        worker, kind = self._any(), self.random.random()
        if kind < 0.06:
            self._add_search(worker, prompt)
        elif kind < 0.25 and self.limits.num_query_vectors:
            for _ in range(self.random.choice([1, 3])):
                self._add_document(worker, prompt)
        else:
            size = self.random.choice([1, 1, 1, 2, 4])
            sample_group = SampleGroup() if size > 1 else None
            for _ in range(size):
                self._add(worker, prompt, sample_group)

    def _fields(self) -> dict[str, object]:
        late = self.random.random() < 0.1
        return {
            "payload": Payload(b"p"),
            "tenant": self.random.choice("abc"),
            "priority": self.random.randrange(3),
            "arrival": self.now,
            "deadline": self.now + self.random.randrange(5, 60) if late else float("inf"),
        }

    def _add(self, worker: Worker, prompt: list[int], sample_group: SampleGroup | None) -> None:
        key, max_tokens = len(self.clients), self.random.randrange(1, 40)
        grammar = self.random.choice(GRAMMARS) if self.random.random() < 0.3 else b""
        eos = self.random.random() < 0.5
        fields = self._fields() | {"sample_group": sample_group, "grammar_id": grammar, "grammar_bytes": 1000}
        sequence = make_sequence(
            key, prompt, max_tokens, self.limits.block_size, eos_token_ids=(EOS,) if eos else (), **fields
        )
        limit = min(len(prompt) + max_tokens, self.limits.max_model_len)
        self.clients[key] = Client(prompt, limit, eos, may_fail=bool(grammar))
        worker.core.add(sequence)

    def _add_document(self, worker: Worker, prompt: list[int]) -> None:
        key, tokens = len(self.clients), self.random.choice(QUERIES)
        asked = LateQuery(hashlib.sha256(tokens).digest(), tokens, Payload(b"q"))
        fields = self._fields() | {"samples_nothing": True, "skip_reading_prefix_cache": True, "query": asked}
        self.clients[key] = Client(prompt, len(prompt), is_scored=True, may_fail=True)
        worker.core.add(make_sequence(key, prompt, 0, self.limits.block_size, **fields))

    def _add_search(self, worker: Worker, prompt: list[int]) -> None:
        width = self.random.randrange(1, 4)
        room = self.limits.max_model_len - len(prompt)
        max_tokens = min(room, self.random.randrange(1, 20))
        root = search(len(self.clients), prompt, width, max_tokens=max_tokens, arrival=self.now)
        assert root.search is not None
        found = exhaustive(prompt, root.search.rules)
        for output, (said, _, _) in zip(root.outputs, found, strict=True):
            self.clients[output.sequence_id] = Client(prompt, 0, root=root, found=said)
        worker.core.add(root)

    # They go, or go elsewhere.

    def _worker_of(self, key: int) -> Worker | None:
        return next((worker for worker in self.workers if worker.core.find(key) is not None), None)

    def cancel(self) -> None:
        alive = [key for key, client in self.clients.items() if client.end is None]
        if alive:
            root = self.clients[key := self.random.choice(alive)].root
            key = key if root is None else root.key
            worker = self._worker_of(key)
            assert worker is not None, "an unfinished sequence is with one of the workers"
            worker.core.cancel(key)

    def preempt(self) -> None:
        core = self._any().core
        slots = np.flatnonzero(core.running.live).tolist()
        if slots:
            core.preempt(self.random.choice(slots))

    def migrate(self) -> None:
        """Moves a running sequence to the other worker."""
        source = self._any()
        running = [s for s in source.core.state.sequences.values() if s.status is SequenceStatus.RUNNING]
        able = [s for s in running if can_be_handed_over(s) and source.core.running.has_progressed(s)]
        if able:
            sequence = self.random.choice(able)
            source.core.migrate_out(sequence)
            self.other(source).core.add(sequence)

    def give_back(self) -> None:
        """Moves sequences without a slot to the other worker."""
        source = self._any()
        for sequence in source.core.evacuate_waiting():
            self.other(source).core.add(sequence)

    def restart(self) -> None:
        """Loses a worker with everything in flight, and attaches another one."""
        gone = self._any()
        loss = WorkerLoss("w", self._num_attached) if self.random.random() < 0.5 else None
        moved = gone.core.evacuate(loss)
        left = self.other(gone)
        if gone.core.peer_blocks is not None and left.core.peer_blocks is not None:
            for order in gone.core.peer_blocks.orders_under_way():
                order.borrowed.release()
            left.core.unblock(left.core.peer_blocks.abandon_source(gone))
        self.workers[self.workers.index(gone)] = self._attach()
        for sequence in moved:
            self._any().core.add(sequence)

    def reset(self) -> None:
        """Resets a worker's caches, if nothing is in flight there."""
        worker = self._any()
        core = worker.core
        moving = sum(moves.num_in_flight for moves in (core.host_blocks, core.peer_blocks) if moves is not None)
        if not core.steps_in_flight and not moving and core.reset_prefix_cache(preempt_running=True) is not None:
            worker.vectors.clear()

    # Steps.

    def plan(self, worker: Worker | None = None) -> bool:
        worker = worker or self._any()
        self.now += 1
        self._order_grammars(worker)
        plan = worker.core.schedule(self.now)
        if plan is None:
            return False
        wire = encode_plan(plan, 1)
        for admission in wire.plan.admitted:
            admission.sequence_key = 0 if admission.is_query else admission.sequence_key  # counted by process
        self.sent.update(wire.SerializeToString(deterministic=True))
        worker.results.append(self._with_failures(worker, plan, worker.paper.execute(plan)))
        return True

    def _with_failures(self, worker: Worker, plan: StepPlan, result: StepResult) -> StepResult:
        """Checks that documents find their queries' vectors, and constrained sequences their grammars. A query fails
        now and then."""
        worker.vectors.difference_update(plan.dropped_queries)
        for admission in plan.admitted:
            assert not admission.sequence.grammar_id or admission.sequence.grammar_id in worker.grammars
        flight, failures = worker.core.steps_in_flight[-1], []
        queries = {slot: worker.core.running.sequence(slot).query for slot in flight.late_queries}
        for slot, is_query in sorted(flight.late_queries.items(), key=lambda late: not late[1]):
            query = queries[slot]
            assert query is not None
            if is_query and self.random.random() < 0.1:
                failures.append((slot, BROKEN))
                worker.failing.add(query.name)
            elif is_query:
                worker.failing.discard(query.name)
                worker.vectors.add(query.name)
            else:
                assert query.name in worker.vectors | worker.failing
        return replace(result, failures=failures) if failures else result

    def result(self, worker: Worker | None = None) -> bool:
        worker = worker or self._any()
        if not worker.results:
            return False
        worker.core.apply(worker.results.popleft(), self.now)
        return True

    # What sequences wait for.

    def _order_grammars(self, worker: Worker) -> None:
        for order in worker.core.grammars.take_orders():
            self.sent.update(encode_order(order).SerializeToString(deterministic=True))
            if order.sequence is None:
                worker.grammars.remove(order.grammar_id)
            else:
                worker.preparing.append(order.grammar_id)

    def prepare(self, worker: Worker | None = None) -> bool:
        worker = worker or self._any()
        self._order_grammars(worker)
        if not worker.preparing:
            return False
        grammar_id = worker.preparing.pop(0)
        assert worker.core.grammars.awaits(grammar_id)
        if self.random.random() < 0.1:
            worker.core.on_grammar_prepared(grammar_id, BROKEN)
        else:
            worker.grammars.add(grammar_id)
            worker.core.on_grammar_prepared(grammar_id)
        return True

    def transfer(self, worker: Worker | None = None) -> bool:
        """Ends a transfer between the device, host memory and disk, perhaps with a failure."""
        worker = worker or self._any()
        for order in worker.core.host_blocks.take_orders() if worker.core.host_blocks is not None else ():
            self.sent.update(encode_transfer(order).SerializeToString(deterministic=True))
            if isinstance(order, DiskOrder):
                worker.on_disk.append(order)
            else:
                worker.transfers.append(order)
        if worker.on_disk and (not worker.transfers or self.random.random() < 0.5):
            disk = worker.on_disk.pop(self.random.randrange(len(worker.on_disk)))
            failing = {number for number in range(len(disk.hashes)) if self.random.random() < 0.05}
            worker.core.on_transfer_done(disk.transfer_id, lost=worker.paper.disk_transfer(disk, failing))
            return True
        if not worker.transfers:
            return False
        order = worker.transfers.popleft()
        failed = self.random.random() < 0.1
        if not failed:
            worker.paper.transfer(order)
        worker.core.on_transfer_done(order.transfer_id, failed=failed)
        return True

    def fetch(self, worker: Worker | None = None) -> bool:
        """Ends a fetch from the other worker, perhaps with a failure."""
        worker = worker or self._any()
        for order in worker.core.peer_blocks.take_orders() if worker.core.peer_blocks is not None else ():
            self.sent.update(repr((order.fetch_id, order.borrowed.loan, order.blocks, order.hashes)).encode())
            worker.fetches.append(order)
        if not worker.fetches:
            return False
        order = worker.fetches.pop(self.random.randrange(len(worker.fetches)))
        failed = order.borrowed.source is not self.other(worker) or self.random.random() < 0.1
        if not failed:
            for there, here in zip(order.borrowed.loan.blocks, order.blocks, strict=True):
                for offset in range(self.limits.block_size):
                    worker.paper.kv[here, offset] = self.other(worker).paper.kv[there, offset]
        worker.core.on_fetch_done(order.fetch_id, failed=failed)
        return True

    def look(self) -> None:
        """Has sequences that have waited long for the other worker's blocks compute them."""
        core = self._any().core
        if core.peer_blocks is not None:
            core.unblock(core.peer_blocks.tick(3))

    # What is checked.

    def collect(self) -> None:
        for worker in self.workers:
            events = worker.core.take_events()
            for pooled in events.pooled:
                client = self.clients[pooled.sequence.sequence_id]
                assert client.is_scored
                assert not client.vector, "one vector"
                client.vector = pooled.values
            for columns in events.tokens:
                counts = columns.token_counts
                ids = columns.sequence_ids if counts is None else np.repeat(columns.sequence_ids, counts)
                for sequence_id, token in zip(ids.tolist(), columns.token_ids.tolist(), strict=True):
                    assert self.clients[sequence_id].end is None
                    self.clients[sequence_id].tokens.append(token)
            for finished in events.finished:
                client = self.clients[finished.sequence.sequence_id]
                assert client.end is None, "one terminal event"
                client.end = finished

    def check(self) -> None:
        present: list[int] = []
        for worker in self.workers:
            core, use = worker.core, worker.core.use
            assert use.free + use.cached + use.used == use.total == self.limits.num_blocks - 1
            assert core.kv.num_unowned() == 0
            for prerequisite in core.state.queue.prerequisites:
                prerequisite.check_invariant()
            sequences = list(core.state.sequences.values())
            without_slot = [s for s in sequences if s.status is not SequenceStatus.RUNNING]
            assert core.num_waiting == len(without_slot)
            assert core.num_waiting_tokens == sum(s.num_queued_tokens for s in without_slot)
            present += [s.key for s in sequences if not s.is_query]
        alive = {key if c.root is None else c.root.key for key, c in self.clients.items() if c.end is None}
        assert sorted(present) == sorted(alive), "each is with one worker until it ends"

    def drain(self) -> None:
        for _ in range(100_000):
            advanced = False
            for worker in self.workers:
                for operation in (self.plan, self.prepare, self.transfer, self.fetch, self.result):
                    advanced |= operation(worker)
            self.collect()
            if not advanced:
                assert not any(worker.core.has_work for worker in self.workers), "stuck"
                return
        raise AssertionError("does not end")

    def verify(self) -> None:
        for client in self.clients.values():
            assert client.end is not None
            cut = client.end.reason in (Reason.CANCELLED, Reason.DEADLINE) or client.end.failure is TOO_FEW_BLOCKS
            if client.end.reason is Reason.ERROR and not cut:
                assert client.may_fail
                assert client.end.failure is BROKEN
                cut = True
            if client.is_scored:
                assert client.vector == (b"" if cut else digest(client.prompt))
                continue
            root = client.root
            expected = oracle(client.prompt, client.limit, client.eos) if root is None else client.found
            assert client.tokens == (expected[: len(client.tokens)] if cut else expected)
        for worker in self.workers:
            assert worker.core.use.used == 0, "no live sequence owns them"
            assert worker.core.running.num_free_slots == self.limits.max_num_seqs
            assert worker.core.num_waiting == worker.core.num_waiting_tokens == 0


def operate(limits: CoreLimits, seed: int, count: int = 600) -> TwoWorkers:
    """Performs random operations and checks after each; then finishes what is left."""
    cluster = TwoWorkers(limits, seed)
    weights = {
        cluster.add: 4,
        cluster.cancel: 1,
        cluster.preempt: 1,
        cluster.migrate: 1,
        cluster.give_back: 0.3,
        cluster.restart: 0.3,
        cluster.reset: 0.3,
        cluster.look: 0.5,
        cluster.plan: 20,
        cluster.result: 20,
        cluster.prepare: 4,
        cluster.transfer: 12,
        cluster.fetch: 6,
    }
    for _ in range(count):
        cluster.random.choices(list(weights), weights=list(weights.values()))[0]()
        cluster.collect()
        cluster.check()
    cluster.drain()
    cluster.check()
    cluster.verify()
    return cluster
