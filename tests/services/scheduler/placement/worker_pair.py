"""Two replicas with reference workers that can read each other's blocks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from quire.services.scheduler.cluster.cluster import WorkerCluster
from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import Events
from quire.services.scheduler.core.prerequisites.peer_blocks import FetchOrder
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.kv.kv_source import KVSource
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.settings import SchedulerSettings
from tests.services.scheduler.conftest import make_limits, make_sequence
from tests.services.scheduler.reference_worker import ReferenceWorker

SIZE = 4
LAYOUT = b"l" * 32
PACE_S = 0.01  # for a token of a prompt


class PairedWorker:
    """A replica and its worker, driven by the test."""

    def __init__(self, name: str, cluster: WorkerCluster, metrics: SchedulerMetrics, **limits: Any) -> None:
        values = {"num_blocks": 64, "block_size": SIZE, "max_num_seqs": 8, "enable_prefix_caching": True, **limits}
        role = str(values.pop("role", ""))
        self.limits = make_limits(**values)
        self.core = Core(self.limits)
        self.core.estimate_prompt_s = lambda tokens: tokens * PACE_S  # type: ignore[method-assign]
        self.worker = ReferenceWorker(self.limits)
        self.events: list[Events] = []
        self.soon: deque[Callable[[], None]] = deque()
        hello = worker_pb2.WorkerHello(
            worker_id=name,
            role=role,
            kv_transfer=worker_pb2.KVTransferSource(address=f"{name}:1", layout=LAYOUT, block_bytes=100),
            limits=worker_pb2.StepLimits(max_num_seqs=8),
        )
        self.replica = Replica(
            hello,
            1 if name == "a" else 2,
            self.core,
            send=lambda _: None,
            deliver=self.events.append,
            clock=lambda: 0.0,
            call_soon=self.soon.append,
            call_later=lambda _, call: None,
            metrics=metrics,
            changes=BlockChanges(),
        )

    def step(self) -> bool:
        plan = self.core.schedule(0)
        if plan is not None:
            self.watched()
            self.core.apply(self.worker.execute(plan), 0)
        self.replica.flush()
        self.watched()
        return plan is not None

    def watched(self) -> None:
        """Calls what follows a pump."""
        if self.replica.on_pump is not None:
            self.replica.on_pump(self.replica)

    def orders(self) -> list[FetchOrder]:
        assert self.core.peer_blocks is not None
        return self.core.peer_blocks.take_orders()


class WorkerPair:
    """A cluster of two workers."""

    def __init__(self, roles: tuple[str, str] = ("", ""), **limits: Any) -> None:
        self.metrics = metrics = SchedulerMetrics(CollectorRegistry())
        settings = SchedulerSettings(id="s", grpc_port=0, metrics_port=0, prefill_threshold=16)
        self.cluster = WorkerCluster(settings, lambda: 0.0, metrics)
        self.cluster.add_frontend(0, lambda _: None)
        both = zip("ab", roles, strict=True)
        self.a, self.b = (PairedWorker(name, self.cluster, metrics, role=role, **limits) for name, role in both)
        for side in (self.a, self.b):
            self.cluster.attach(side.replica)
        self._keys = iter(range(1, 10_000))

    @property
    def sides(self) -> tuple[PairedWorker, PairedWorker]:
        return self.a, self.b

    def add(self, side: PairedWorker, prompt: list[int], max_tokens: int = 2, **fields: Any) -> Sequence:
        sequence = make_sequence(next(self._keys), prompt, max_tokens, SIZE, **fields)
        side.core.add(sequence)
        self.cluster.assignments._replica_of[sequence.key] = side.replica
        return sequence

    def place(self, prompt: list[int], max_tokens: int = 2, **fields: Any) -> Sequence:
        """Adds a sequence where the cluster places it."""
        sequence = make_sequence(next(self._keys), prompt, max_tokens, SIZE, **fields)
        self.cluster.assignments.assign(sequence, parking=False)
        return sequence

    def where(self, sequence: Sequence) -> str:
        replica = self.cluster.assignments.replica_of(sequence.key)
        assert replica is not None
        return replica.id

    def run(self, side: PairedWorker, prompt: list[int], max_tokens: int = 2) -> Sequence:
        """Runs a sequence alone, with everything that it orders."""
        sequence = self.add(side, prompt, max_tokens)
        self.settle()
        return sequence

    def settle(self) -> None:
        while sum(side.step() for side in self.sides) or self.carry():
            pass

    def carry(self, *, failed: bool = False) -> bool:
        """Executes pending fetches; returns whether there were any."""
        orders = [(side, order) for side in self.sides for order in side.orders()]
        for side, order in orders:
            if not failed:
                self.copy(side, order)
            side.core.on_fetch_done(order.fetch_id, failed=failed)
            side.watched()
        return bool(orders)

    def copy(self, side: PairedWorker, order: FetchOrder) -> None:
        source = order.borrowed.source
        assert isinstance(source, KVSource)
        lender = next(other for other in self.sides if other.replica.id == source.worker_id)
        for there, here in zip(order.borrowed.loan.blocks, order.blocks, strict=True):
            for offset in range(SIZE):
                side.worker.kv[here, offset] = lender.worker.kv[there, offset]

    def is_at_rest(self) -> bool:
        """Returns whether nothing is owned, lent or waited for."""
        cores = [side.core for side in self.sides]
        unowned = [core.kv.num_unowned() for core in cores]
        return unowned == [0, 0] and not any(core.use.used or core.num_waiting or core.has_work for core in cores)
