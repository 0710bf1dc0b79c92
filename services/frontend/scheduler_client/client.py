"""Runs sequences on the available schedulers: places them, moves them when a session breaks, ends each exactly once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby

from quire.services.frontend.scheduler_client.connection import Connection, ConnectionTiming
from quire.services.frontend.scheduler_client.connections import SchedulerConnections
from quire.services.frontend.scheduler_client.pending_queue import Group, PendingQueue
from quire.services.frontend.scheduler_client.placement import NO_CACHED_TOKENS, CachedTokens, choose, is_usable
from quire.services.frontend.scheduler_client.sequence import Sequence
from quire.services.frontend.scheduler_client.session import Session
from quire.services.frontend.scheduler_client.token_batch import error_end
from quire.services.frontend.scheduler_client.wait_policy import WaitPolicy
from quire.shared.errors import DeadlineExceeded, Internal, QuireError, ResourceExhausted, Unavailable
from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.models import adapter_ids
from quire.shared.pb.common.v1 import finish_pb2
from quire.shared.pb.common.v1.finish_pb2 import FinishReason
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.rpc.trust import Dialler
from quire.shared.structured_output.backends import LLGUIDANCE

log = logger("scheduler_client")

REFUSAL_PAUSE_S = 0.2  # pause before a refused sequence is submitted again, unless the scheduler named one


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """Capabilities that requests may rely on, combined over the usable clusters."""

    max_model_len: int
    max_logprobs: int
    scheduling_policies: frozenset[str]
    logits_processors: frozenset[str] = frozenset()  # supported by all
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # available in all clusters: name -> content digest
    grammar_libraries: tuple[str, ...] = ()  # supported by all, in order of preference; empty: llguidance
    media_modalities: frozenset[str] = frozenset()  # that some worker encodes


class SchedulerClient:
    """Owns the sessions with all schedulers and every active sequence. Runs in one event loop, without locks."""

    def __init__(
        self,
        addresses: Seq[str],
        hello: pb.FrontendHello,
        *,
        wait_policy: WaitPolicy,
        retry_after_ms: int,
        metrics: FrontendMetrics,
        dialler: Dialler,
        timing: ConnectionTiming,
    ) -> None:
        """Prepares a connection to each address; run() connects. `retry_after_ms`: hint of errors when no worker is
        available."""
        self.connections = SchedulerConnections(
            addresses,
            lambda address, known: Connection(
                address, hello, self, dialler, known=known, longest_pause_s=timing.longest_pause_s
            ),
            timing.forget_after_s,
        )
        self._wait_policy = wait_policy
        self._retry_after_ms = retry_after_ms
        self._metrics = metrics
        self.sessions: list[Session] = []
        self._last_session_change_s = -math.inf
        self._num_held = 0  # requests in wait_for_limits()
        self.pending = PendingQueue(self._fail_without_worker)
        self.retrying = PendingQueue(self._resubmit)  # refused sequences, until they are submitted again
        self._workerless: dict[Session, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._limits: ClusterLimits | None = None
        metrics.waiting_for_scheduler.set_function(lambda: self.num_waiting)
        metrics.held_requests.set_function(lambda: self._num_held + self.num_waiting)
        metrics.worker_start.set(wait_policy.start_s)

    async def run(self) -> None:
        """Runs the sessions until cancelled. Raises FailedPrecondition if a configured scheduler serves another
        model."""
        await self.connections.run()

    @property
    def is_open(self) -> bool:
        return bool(self.sessions)

    @property
    def limits(self) -> ClusterLimits | None:
        """The combined limits, or None while no cluster is usable."""
        return self._limits

    @property
    def usable_sessions(self) -> list[Session]:
        """Sessions that accept new sequences."""
        return [session for session in self.sessions if is_usable(session.view)]

    @property
    def num_workers(self) -> int:
        """Number of workers that accept sequences, over all schedulers."""
        return sum(session.view.num_workers for session in self.usable_sessions)

    @property
    def load(self) -> dict[str, float]:
        """Load of all schedulers as last reported, under the names of vLLM's load header."""
        views = [session.view for session in self.usable_sessions]
        usage = sum(view.kv_cache_usage * view.num_workers for view in views) / max(1, self.num_workers)
        return {
            "kv_cache_usage_perc": round(usage, 3),
            "num_requests_waiting": float(sum(view.num_waiting for view in views) + self.num_waiting),
            "num_requests_running": float(sum(view.num_running for view in views)),
        }

    @property
    def num_waiting(self) -> int:
        """Number of submissions that no session can take now."""
        return len(self.pending)

    async def wait_for_change(self) -> None:
        """Returns at the next change of the sessions or of their limits."""
        await self._changed.wait()

    async def wait_for_limits(self, deadline_s: float | None) -> ClusterLimits:
        """Waits until a cluster is usable. Raises Unavailable when the wait policy's time is over, DeadlineExceeded at
        the deadline."""
        if (limits := self.limits) is not None:
            return limits
        began_s = asyncio.get_running_loop().time()
        self._num_held += 1
        try:
            return await self._first_limits(began_s, deadline_s)
        finally:
            self._num_held -= 1
            self._metrics.held.observe(asyncio.get_running_loop().time() - began_s)

    async def _first_limits(self, began_s: float, deadline_s: float | None) -> ClusterLimits:
        """Waits until a cluster is usable and returns its limits. `began_s`: start of the wait. Raises Unavailable,
        DeadlineExceeded."""
        while (limits := self.limits) is None:
            policy_ends_s = self._wait_policy.deadline_s(
                began_s, self._last_session_change_s, has_scheduler=self.is_open
            )
            until_s = policy_ends_s if deadline_s is None else min(policy_ends_s, deadline_s)
            try:
                async with asyncio.timeout_at(until_s):
                    await self.wait_for_change()
            except TimeoutError:
                if until_s == deadline_s:
                    raise DeadlineExceeded("the request's deadline passed while no worker was available") from None
                waited_s = round(until_s - began_s, 1)
                raise Unavailable(
                    f"no worker became available within {waited_s:g} s; retry later",
                    retry_after_ms=self._retry_after_ms,
                ) from None
        return limits

    @property
    def _wait_s(self) -> float:
        """Seconds for which a new submission may wait for a worker."""
        return self._wait_policy.wait_s(has_scheduler=self.is_open)

    def submit(self, sequences: Seq[Sequence], cached: CachedTokens) -> None:
        """Submits all samples of one prompt, in order, or lets them wait for a worker; errors come through the sinks.
        `cached`: prompt tokens cached per scheduler."""
        group = tuple(sequences)
        if group[0].prompt_request.is_beam_search:
            for sequence in group:
                sequence.group = group
        self._place(group, cached)

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Cancels sequences at their session, or waiting for one; their sinks get nothing more."""
        for sequence in sequences:
            sequence.is_active = False
        for session in {sequence.session for sequence in sequences if sequence.session is not None}:
            session.cancel([sequence for sequence in sequences if sequence.session is session], reason)
        self.pending.remove(sequences)
        self.retrying.remove(sequences)

    def _place(self, group: Group, cached: CachedTokens = NO_CACHED_TOKENS) -> None:
        """Sends a group to a scheduler. A group that cannot be sent because of a fault here fails alone."""
        active = tuple(sequence for sequence in group if sequence.is_active)
        if not active:
            return
        try:
            self._send(active, cached)
        except Exception:
            log.exception("cannot submit a request", request=active[0].prompt_request.request_id)
            self.cancel(active, finish_pb2.FINISH_REASON_CANCELLED)
            for sequence in active:
                self._fail(sequence, Internal("internal error"))

    def _send(self, group: Group, cached: CachedTokens) -> None:
        """Submits a group to the session that placement chooses; without one, the group waits in `pending`."""
        request = group[0].prompt_request
        session = choose(self.sessions, request.max_total_tokens, cached, request.affinity_key)
        if session is None:
            self.pending.add(group, self._wait_s, self._wait_policy.max_wait_s)
        else:
            session.submit(group, cached.get(session.scheduler_id, 0))

    def _resubmit(self, sequences: Seq[Sequence]) -> None:
        """Submits sequences elsewhere, marked as migrating: they continue after the tokens that were delivered."""
        self._metrics.resubmitted.inc(len(sequences))
        for group in _groups(sequences):
            for sequence in group:
                sequence.mark_migrating()
            self._place(group)

    def on_open(self, session: Session) -> None:
        """Implements ConnectionOwner.on_open(): adds the session, extends the waits of pending groups, and applies the
        session's cluster view (on_view()), which may place them."""
        self.sessions.append(session)
        self._metrics.sessions_open.set(len(self.sessions))
        self._last_session_change_s = asyncio.get_running_loop().time()
        self.pending.extend_waits(self._wait_s)
        self.on_view(session)

    def find_session(self, welcome: pb.SchedulerWelcome) -> Session | None:
        """Implements ConnectionOwner.find_session(): a session matches by scheduler id and epoch, which changes with
        every start."""
        lifetime = welcome.scheduler_id, welcome.epoch
        return next((s for s in self.sessions if (s.scheduler_id, s.epoch) == lifetime), None)

    def on_broken(self, session: Session) -> None:
        """Implements ConnectionOwner.on_broken(): removes the session and resubmits its sequences to others."""
        self.sessions.remove(session)
        self._limits = self._common_limits()
        self._last_session_change_s = asyncio.get_running_loop().time()
        sequences = session.abandon()
        self._clear_workerless(session)
        self._metrics.sessions_open.set(len(self.sessions))
        if sequences:
            log.warning(
                "resubmitting sequences of a broken session", scheduler=session.scheduler_id, sequences=len(sequences)
            )
        self._resubmit(sequences)
        self._notify()

    def on_view(self, session: Session) -> None:
        """Applies a changed cluster view: recomputes the limits, places pending groups if the session is usable, and
        starts or stops the timer of a scheduler without workers."""
        self._limits = self._common_limits()
        self._share_weights()
        if is_usable(session.view):
            for group in self.pending.take_all():
                self._place(group)
        if session.view.num_workers:
            self._clear_workerless(session)
        elif session not in self._workerless:
            loop = asyncio.get_running_loop()
            self._workerless[session] = loop.call_later(self._wait_s, self._on_workerless_timeout, session)
        self._move_off_workerless()
        self._notify()

    def _common_limits(self) -> ClusterLimits | None:
        """Returns the combined limits of the usable sessions, or None without any: the largest lengths, and the
        adapters, logits processors and libraries that all have. Computed at each change, since every request reads
        them."""
        views = [session.view for session in self.usable_sessions]
        if not views:
            return None
        return ClusterLimits(
            max(v.max_model_len for v in views),
            max(v.max_logprobs for v in views),
            frozenset(v.scheduling_policy for v in views),
            frozenset.intersection(*(frozenset(v.logits_processors) for v in views)),
            _common_adapters(views),
            _common_libraries(views),
            frozenset(name for v in views for name in v.media_modalities),
        )

    def _clear_workerless(self, session: Session) -> None:
        """Stops the timer of a session that has workers again or is closed."""
        if (timer := self._workerless.pop(session, None)) is not None:
            timer.cancel()

    def _move_off_workerless(self) -> None:
        """Resubmits the sequences of schedulers that have lost all workers, if another scheduler has some."""
        if self.limits is None:
            return
        for session in self._workerless:
            sequences = list(session.live.values())
            session.cancel(sequences, finish_pb2.FINISH_REASON_CANCELLED)
            self._resubmit(sequences)

    def _on_workerless_timeout(self, session: Session) -> None:
        """Fails the sequences of a scheduler that has been without workers for too long; waits on while it still
        delivers tokens."""
        loop = asyncio.get_running_loop()
        idle_until_s = session.last_tokens_s + self._wait_s
        if idle_until_s > loop.time():  # a draining worker still finishes its sequences
            self._workerless[session] = loop.call_at(idle_until_s, self._on_workerless_timeout, session)
            return
        del self._workerless[session]
        sequences = tuple(session.live.values())
        session.cancel(sequences, finish_pb2.FINISH_REASON_CANCELLED)
        self._fail_without_worker(sequences)

    def _share_weights(self) -> None:
        """Sends the newest weights identity to schedulers that missed the update."""
        newest = max((session.view.weights for session in self.sessions), key=lambda weights: weights.update)
        for session in self.sessions:
            session.send_weights(newest)

    def on_resumed(self, sequence: Sequence, now: float) -> None:
        """Observes how long a moved sequence was without tokens."""
        assert sequence.migrating_since_s is not None
        self._metrics.migration.observe(now - sequence.migrating_since_s)
        sequence.migrating_since_s = None

    def on_tokens_delivered(self, seconds: float) -> None:
        self._metrics.detokenize.observe(seconds)

    def on_refused(self, sequence: Sequence, error: QuireError) -> None:
        """Retries a sequence that a draining or overloaded scheduler refused, or fails it; ignores a cancelled one."""
        if not sequence.is_active:
            return
        try:
            self._retry_or_fail(sequence, error)
        except Exception:
            log.exception("cannot resubmit a request", request=sequence.prompt_request.request_id)
            self._fail(sequence, Internal("internal error"))

    def _retry_or_fail(self, sequence: Sequence, error: QuireError) -> None:
        """Retries a sequence after a pause if the refusal is transient and has not lasted for `outage_s`, else fails
        it. A group is retried whole."""
        now = asyncio.get_running_loop().time()
        is_transient = isinstance(error, Unavailable) or (isinstance(error, ResourceExhausted) and not sequence.is_new)
        sequence.refused_since_s = sequence.refused_since_s or now
        if is_transient and sequence.group and sequence is not sequence.group[0]:
            return  # the group is retried once, with its first sequence
        if not is_transient or now - sequence.refused_since_s > self._wait_policy.outage_s:
            self._fail(sequence, error)
        else:
            pause_s = error.retry_after_ms / 1000 or REFUSAL_PAUSE_S
            self.retrying.add(sequence.group or (sequence,), pause_s, pause_s)

    def _fail_without_worker(self, group: Group) -> None:
        """Fails the active sequences of a group whose wait for a worker is over."""
        for sequence in group:
            if sequence.is_active:
                self._fail(sequence, self._no_worker())

    def _no_worker(self) -> Unavailable:
        return Unavailable("no worker can take this request now", retry_after_ms=self._retry_after_ms)

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        """Ends a sequence with the error; a failure of its sink is logged, so that the other sequences continue."""
        sequence.is_active = False
        now = asyncio.get_running_loop().time()
        try:
            sequence.sink.on_end(error_end(error), now)
        except Exception:  # the other sequences of the step must still get their results
            log.exception("cannot report the end of a request", request=sequence.prompt_request.request_id)

    def _notify(self) -> None:
        """Wakes all callers of wait_for_change(); later callers wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _common_adapters(views: Seq[pb.ClusterView]) -> dict[str, bytes]:
    """Returns the adapters that are the same in all clusters, by name and content."""
    found = [adapter_ids.digests_by_name(view.adapters, view.adapter_digests) for view in views]
    return dict(set.intersection(*(set(adapters.items()) for adapters in found)))


def _common_libraries(views: Seq[pb.ClusterView]) -> tuple[str, ...]:
    """Returns the grammar libraries that all clusters support, in the order of the first. If they share none, returns
    the first cluster's; the others refuse what they cannot compile."""
    first, *others = (tuple(view.structured_output_backends) or (LLGUIDANCE,) for view in views)
    return tuple(name for name in first if all(name in names for names in others)) or first


def _groups(sequences: Seq[Sequence]) -> Iterator[Group]:
    """Groups sequences that must be submitted together: the results of one beam search; other sequences alone."""
    for _, members in groupby(
        sequences, key=lambda s: id(s.prompt_request) if s.prompt_request.is_beam_search else id(s)
    ):
        yield tuple(members)
