"""One attachment of a worker: its core, its stream, and the step loop that connects them."""

from __future__ import annotations

import asyncio
import math
from collections import defaultdict, deque
from collections.abc import Callable
from time import perf_counter
from typing import Protocol

from quire.services.scheduler.core.core import Core
from quire.services.scheduler.core.plan import Events
from quire.services.scheduler.core.prerequisites.encoder_outputs import EncoderOrder
from quire.services.scheduler.core.sequences.ending import Reason
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.adapters import ReplicaAdapters
from quire.services.scheduler.replicas.block_changes import BlockChanges
from quire.services.scheduler.replicas.codec import (
    decode_failure,
    decode_result,
    encode_encoder_order,
    encode_fetch,
    encode_order,
    encode_plan,
    encode_transfer,
)
from quire.services.scheduler.replicas.orders import DeviceOrders, weights_of
from quire.services.scheduler.replicas.result_checks import ResultChecks
from quire.services.scheduler.replicas.throughput import Throughput
from quire.services.scheduler.replicas.worker_links import WorkerLink
from quire.shared.columns import u32
from quire.shared.errors import FailedPrecondition
from quire.shared.kv.kv_source import KVSource
from quire.shared.logs import logger
from quire.shared.metrics.scheduler import SchedulerMetrics
from quire.shared.pb.worker.v1 import worker_pb2 as pb

log = logger("replicas")

Clock = Callable[[], float]


class MediaRoute(Protocol):
    """Sends a worker's orders to encode media: to the worker itself, or to an encode worker first."""

    def order(self, replica: Replica, order: EncoderOrder) -> None:
        """Sends an order of the worker's core."""

    def handle_report(self, replica: Replica, wire: pb.MediaPrepared) -> bool:
        """Handles the worker's report on an item. Returns False if it is left to the core."""


class OwnEncoder:
    """MediaRoute of workers that encode by themselves."""

    def order(self, replica: Replica, order: EncoderOrder) -> None:
        """Sends an order to the worker."""
        replica.send(encode_encoder_order(order))

    def handle_report(self, replica: Replica, wire: pb.MediaPrepared) -> bool:
        """Returns False: the core handles all reports."""
        return False


OWN_ENCODER = OwnEncoder()


class Replica:
    """Sends steps as long as the core plans some; each result triggers the next step. Events go to `deliver`."""

    def __init__(
        self,
        hello: pb.WorkerHello,
        epoch: int,
        core: Core,
        *,
        send: Callable[[pb.AttachResponse], None],
        deliver: Callable[[Events], None],
        clock: Clock,
        call_soon: Callable[[Callable[[], None]], object],
        call_later: Callable[[float, Callable[[], None]], object],
        metrics: SchedulerMetrics,
        changes: BlockChanges,
    ) -> None:
        """Connects a core with its stream; nothing is sent yet. `send`: queues a message without blocking;
        `deliver`: receives the core's events; `call_soon`, `call_later`: schedule callbacks, whose errors end this
        attachment only."""
        self.hello = hello
        self._checks = ResultChecks(hello)
        self.epoch = epoch
        self.core = core
        self.changes = changes
        self.leaving = False
        self.was_abandoned = False  # ended by the scheduler, because of an error
        self.adapters = ReplicaAdapters(hello, send, lambda outcome: metrics.operations.adapter_loads[outcome].inc())
        self.orders = DeviceOrders(send)
        self.weights = weights_of(hello)
        self.asleep = frozenset(hello.weights_state.asleep)
        self.sleep_level = hello.weights_state.sleep_level
        self.outdated = False  # differs from the cluster's target state (weights, sleep); gets no sequences
        self.state_unknown = False  # an operation was interrupted; the worker has to attach again
        self.became_outdated = asyncio.Event()  # set when the worker becomes outdated
        self.last_step_at: float | None = None
        self.attached_at = clock()
        self.throughput = Throughput()
        self.links: defaultdict[str, WorkerLink] = defaultdict(WorkerLink)  # links from other workers, by id
        self.send = send
        self._deliver = deliver
        self._clock = clock
        self._call_soon = call_soon
        self._call_later = call_later
        self._next_at = -math.inf  # time of the scheduled pump
        self._is_pump_scheduled = False
        self._num_pauses = 0
        self.generation_paused = False
        self.on_pump: Callable[[Replica], None] | None = None
        self.media_route: MediaRoute = OWN_ENCODER
        self._metrics = metrics
        self._step_seconds = metrics.step.labels(self.id)
        self._step_tokens = metrics.step_tokens.labels(hello.model.name, self.id)
        self._moved: set[int] = set()  # keys of moved sequences without a token here so far
        self._sent_at: deque[float] = deque()  # send times of the steps in flight
        self._freeing: deque[tuple[int, float]] = (
            deque()
        )  # (step whose return frees the blocks, time of the cancellation)

    @property
    def id(self) -> str:
        return self.hello.worker_id

    @property
    def busy(self) -> bool:
        return bool(self._sent_at)

    @property
    def is_quiescent(self) -> bool:
        """Whether no step and no transfer is in flight."""
        return not self.busy and not self.has_transfers

    @property
    def takes_sequences(self) -> bool:
        return not self.leaving and not self.outdated

    def add(self, sequence: Sequence) -> None:
        """Queues a sequence in the core and schedules a pump. If this raises, the core holds nothing of the
        sequence."""
        self.wake()
        if sequence.moved_at is not None:
            self._moved.add(sequence.key)
        self.core.add(sequence)  # last: the core accepts the whole sequence or nothing

    def cancel(self, key: int, reason: Reason) -> None:
        """Ends a sequence with `reason`, unless it has ended, and schedules a pump; measures the time until its
        blocks are free."""
        self.core.cancel(key, reason)
        if self.core.steps_in_flight:
            self._freeing.append((self.core.steps_in_flight[-1].step_id, self._clock()))
        else:
            self._metrics.cancel_to_free.observe(0)
        self.wake()

    def wake(self) -> None:
        """Schedules a pump, one for everything that arrives until then."""
        if not self._is_pump_scheduled:
            self._call_soon(self.pump)
            self._is_pump_scheduled = True  # only after call_soon succeeded, or the pump would never be scheduled

    def set_pump_callback(self, callback: Callable[[Replica], None]) -> None:
        """Sets a callback that is called after every pump."""
        self.on_pump = callback

    @property
    def paused(self) -> bool:
        return self._num_pauses > 0

    def pause(self) -> None:
        """Stops sending steps until resume() has been called as often as pause()."""
        self._num_pauses += 1

    def resume(self) -> None:
        self._num_pauses -= 1
        self.wake()

    def set_generation_paused(self, paused: bool) -> None:
        """Stops or allows sending steps while generation is paused, independent of pause() and resume()."""
        self.generation_paused = paused
        self.wake()

    def pump(self) -> None:
        """Sends the orders and steps that can be sent now (no steps while paused), delivers events to the frontends
        and calls the pump callback; schedules the next pump if a step is due later."""
        self._is_pump_scheduled = False
        self._send_orders()
        started = perf_counter()
        if self.generation_paused:
            self.core.expire(self._clock())
        while not (self.paused or self.generation_paused) and (plan := self.core.schedule(self._clock())) is not None:
            planned = perf_counter()
            self._metrics.schedule.observe(planned - started)
            self.send(encode_plan(plan, self.epoch))
            self._metrics.encode.observe(perf_counter() - planned)
            self._step_tokens.observe(plan.num_tokens)
            self._sent_at.append(self._clock())
            self._send_transfers()
            started = perf_counter()
        self._send_transfers()
        self.flush()
        if self.on_pump is not None:
            self.on_pump(self)
        self._wake_in_time()

    def _wake_in_time(self) -> None:
        """Schedules a pump for the time when the next step is due, unless that is now or scheduled already."""
        at, now = self.core.next_at, self._clock()
        if at > now and at != self._next_at:
            self._next_at = at
            self._call_later(at - now, self._next_is_due)

    def tokens_per_s(self) -> float:
        """Generated tokens per second over the recent window; 0 if idle."""
        return self.throughput.tokens_per_s(self._clock())

    def _next_is_due(self) -> None:
        self._next_at = -math.inf
        self.pump()

    def apply_result(self, wire: pb.StepResult) -> None:
        """Applies the result of the oldest step in flight, measures it and pumps. Raises FailedPrecondition if the
        result is of another epoch or step, or invalid."""
        self._check(wire)
        now = self._clock()
        started = perf_counter()
        before = self.core.counts.generated_tokens
        self.core.apply(decode_result(wire), now)
        self._metrics.apply.observe(perf_counter() - started)
        self._step_seconds.observe(now - self._sent_at.popleft())
        self.last_step_at = now
        self.throughput.observe(self.core.counts.generated_tokens - before, now)
        while self._freeing and self._freeing[0][0] <= wire.step_id:
            self._metrics.cancel_to_free.observe(now - self._freeing.popleft()[1])
        if self._moved:
            self._measure_moves(now)
        self.pump()

    def _measure_moves(self, now: float) -> None:
        """Observes the pause of each moved sequence that has its first token here."""
        for key in list(self._moved):
            sequence = self.core.find(key)
            if sequence is None:
                self._moved.discard(key)
            elif sequence.moved_at is not None and self.core.running.has_progressed(sequence):
                self._metrics.migration.observe(now - sequence.moved_at)
                sequence.moved_at = None
                self._moved.discard(key)

    def receive_prepared(self, wire: pb.GrammarPrepared) -> None:
        """Handles the worker's answer to a grammar order, which unblocks or fails the sequences that wait for it,
        and schedules a pump. Raises FailedPrecondition for an unknown order."""
        if not self.core.grammars.awaits(wire.grammar_id):
            raise FailedPrecondition(f"grammar_id: the scheduler awaits no grammar {wire.grammar_id.hex()}")
        failure = decode_failure(wire.error) if wire.HasField("error") else None
        self.core.on_grammar_prepared(wire.grammar_id, failure)
        self.wake()

    def receive_media_prepared(self, wire: pb.MediaPrepared) -> None:
        """Handles the worker's answer to an encoder order, which unblocks or fails the sequences that wait for the
        media item, and schedules a pump. Raises FailedPrecondition for an unknown order."""
        if not self.core.encoder_outputs.awaits(wire.identifier):
            raise FailedPrecondition(f"identifier: the scheduler awaits no media item {wire.identifier.hex()}")
        if self.media_route.handle_report(self, wire):
            return
        failure = decode_failure(wire.error) if wire.HasField("error") else None
        self.count_encoding(wire)
        self.core.on_media_encoded(wire.identifier, failure)
        self.wake()

    def count_encoding(self, wire: pb.MediaPrepared) -> None:
        """Adds the time in which a worker, this one or another, encoded a media item to the times of the sequences that
        wait for it."""
        now = self._clock()
        self.core.encoder_outputs.count_time(wire.identifier, (now - wire.encode_us / 1e6, now))

    def receive_transferred(self, wire: pb.Transferred) -> None:
        """Handles the worker's report that a transfer has ended, with or without an error, and schedules a pump.
        Raises FailedPrecondition for an unknown transfer."""
        transfers = self.core.host_blocks
        if transfers is None or not transfers.awaits(wire.transfer_id):
            raise FailedPrecondition(f"transfer_id: the scheduler awaits no transfer {wire.transfer_id}")
        failed = wire.HasField("error")
        if failed:
            log.warning("cannot move KV blocks between device and host", worker=self.id, reason=wire.error.message)
        self.core.on_transfer_done(wire.transfer_id, failed=failed, lost=frozenset(u32(wire.lost_blocks).tolist()))
        self._metrics.transfer.observe(wire.transfer_us / 1e6)
        self.wake()

    def receive_fetched(self, wire: pb.BlocksFetched) -> None:
        """Handles the worker's report that a fetch from another worker has ended: updates the link to that worker
        and the metrics, and schedules a pump. Raises FailedPrecondition for an unknown fetch."""
        fetches = self.core.peer_blocks
        if fetches is None or not fetches.awaits(wire.fetch_id):
            raise FailedPrecondition(f"fetch_id: the scheduler awaits no fetch {wire.fetch_id}")
        failed = wire.HasField("error")
        order = fetches.order(wire.fetch_id)
        num_blocks, source = len(order.blocks), order.borrowed.source
        assert isinstance(source, KVSource)
        link = self.links[source.worker_id]
        self._metrics.fetches.labels(self.id, "failed" if failed else "done").inc()
        if failed:
            link.record_failure()
            log.warning("cannot fetch KV blocks from another worker", worker=self.id, reason=wire.error.message)
        else:
            num_bytes = num_blocks * self.hello.kv_transfer.block_bytes
            link.observe(num_bytes, wire.fetch_us / 1e6)
            self._metrics.fetch.observe(wire.fetch_us / 1e6)
            self._metrics.fetched_bytes.labels(self.id).inc(num_bytes)
            self._metrics.fetched_tokens.labels(self.id).inc(num_blocks * self.core.limits.block_size)
        self.core.on_fetch_done(wire.fetch_id, failed=failed)
        self.wake()

    def unblock(self, sequences: list[Sequence]) -> None:
        """Queues sequences that no longer wait for blocks of other workers."""
        if sequences:
            self.core.unblock(sequences)
            self.wake()

    @property
    def has_transfers(self) -> bool:
        """Whether transfers, fetches or loans are in flight."""
        moves = (self.core.host_blocks, self.core.peer_blocks)
        return any(some is not None and some.num_in_flight > 0 for some in moves)

    def _send_transfers(self) -> None:
        """Sends transfer orders, after the plans that fill or free their blocks."""
        if self.core.host_blocks is not None:
            for order in self.core.host_blocks.take_orders():
                self.send(encode_transfer(order))
        if self.core.peer_blocks is not None:
            for fetch in self.core.peer_blocks.take_orders():
                self.send(encode_fetch(fetch))

    def _send_orders(self) -> None:
        """Sends orders about grammars, and about media unless generation is paused: weights may be changed or asleep
        then."""
        for order in self.core.grammars.take_orders():
            self.send(encode_order(order))
        if self.paused or self.generation_paused:
            return
        for encoder_order in self.core.encoder_outputs.take_orders():
            self.media_route.order(self, encoder_order)

    def flush(self) -> None:
        """Delivers the core's pending events, marked with the current weight version; does nothing if there are
        none."""
        events = self.core.take_events()
        if events:
            events.weight_version = self.weights.version
            started = perf_counter()
            self._deliver(events)
            self._metrics.deliver.observe(perf_counter() - started)

    @property
    def oldest_sent_at(self) -> float | None:
        """Send time of the oldest step in flight; None if there is none."""
        return self._sent_at[0] if self._sent_at else None

    def oldest_step_age_s(self) -> float:
        """Returns the age of the oldest step in flight; 0 if there is none."""
        return self._clock() - self._sent_at[0] if self._sent_at else 0.0

    def _check(self, wire: pb.StepResult) -> None:
        """Raises FailedPrecondition unless the result is of this epoch and of the oldest step in flight, and has
        valid columns."""
        if wire.epoch != self.epoch:
            raise FailedPrecondition(f"epoch: the scheduler is at {self.epoch}, the worker's result at {wire.epoch}")
        due = self.core.steps_in_flight[0].step_id if self.core.steps_in_flight else None
        if wire.step_id != due:
            raise FailedPrecondition(f"step_id: the scheduler waits for {due}, the worker sent {wire.step_id}")
        self._checks.check(wire, self.core.steps_in_flight[0])
