"""Runs sequences on whatever schedulers there are: places them, moves them when a session breaks, ends each once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import groupby

from quire.services.frontend.scheduler_client.connection import Connection
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

REFUSAL_PAUSE_S = 0.2  # before a sequence that a scheduler would not take is offered again, unless that named a time


@dataclass(frozen=True, slots=True)
class ClusterLimits:
    """What the best of the usable clusters can do."""

    max_model_len: int
    max_logprobs: int
    scheduling_policies: frozenset[str]
    logits_processors: frozenset[str] = frozenset()  # that all of them have
    adapters: Mapping[str, bytes] = field(default_factory=dict)  # the same; digests of what they compute by name
    grammar_libraries: tuple[str, ...] = ()  # the same, in order; empty: llguidance


class SchedulerClient:
    """Owns the sessions and every sequence on its way. All of it runs in one event loop, without locks."""

    def __init__(
        self,
        addresses: Seq[str],
        hello: pb.FrontendHello,
        *,
        wait_policy: WaitPolicy,
        retry_after_ms: int,
        metrics: FrontendMetrics,
        dialler: Dialler,
    ) -> None:
        self.connections = SchedulerConnections(
            addresses, lambda address, known: Connection(address, hello, self, dialler, known=known)
        )
        self._wait_policy = wait_policy
        self._retry_after_ms = retry_after_ms
        self._metrics = metrics
        self.sessions: list[Session] = []
        self._seen_s = -math.inf  # when a session began or broke last
        self._num_held = 0  # requests in ready()
        self.pending = PendingQueue(self._fail_for_want_of_workers)
        self.retrying = PendingQueue(self._resubmit)  # until they are offered again
        self._starving: dict[Session, asyncio.TimerHandle] = {}
        self._changed = asyncio.Event()
        self._limits: ClusterLimits | None = None
        metrics.waiting_for_scheduler.set_function(lambda: self.num_waiting)
        metrics.held_requests.set_function(lambda: self._num_held + self.num_waiting)
        metrics.worker_start.set(wait_policy.start_s)

    async def run(self) -> None:
        """Until cancelled; raises FailedPrecondition if a scheduler of the settings serves another model."""
        await self.connections.run()

    @property
    def is_open(self) -> bool:
        return bool(self.sessions)

    @property
    def limits(self) -> ClusterLimits | None:
        """None while nobody can run anything."""
        return self._limits

    @property
    def usable_sessions(self) -> list[Session]:
        """Those that new work may go to."""
        return [session for session in self.sessions if is_usable(session.view)]

    @property
    def num_workers(self) -> int:
        """Of all schedulers, those that take sequences."""
        return sum(session.view.num_workers for session in self.usable_sessions)

    @property
    def load(self) -> dict[str, float]:
        """Of all schedulers, as they told it last, by the names that load balancers know from vLLM."""
        views = [session.view for session in self.usable_sessions]
        usage = sum(view.kv_cache_usage * view.num_workers for view in views) / max(1, self.num_workers)
        return {
            "kv_cache_usage_perc": round(usage, 3),
            "num_requests_waiting": float(sum(view.num_waiting for view in views) + self.num_waiting),
            "num_requests_running": float(sum(view.num_running for view in views)),
        }

    @property
    def num_waiting(self) -> int:
        """Submissions that no session can take now."""
        return len(self.pending)

    async def wait_for_change(self) -> None:
        """Returns at the next change of sessions or of what they can do."""
        await self._changed.wait()

    async def wait_for_limits(self, deadline_s: float | None) -> ClusterLimits:
        """Waits until somebody can run something: Unavailable after the patience, DeadlineExceeded at the deadline."""
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
        while (limits := self.limits) is None:
            patience_ends_s = self._wait_policy.deadline_s(began_s, self._seen_s, has_scheduler=self.is_open)
            until_s = patience_ends_s if deadline_s is None else min(patience_ends_s, deadline_s)
            try:
                async with asyncio.timeout_at(until_s):
                    await self.wait_for_change()
            except TimeoutError:
                if until_s == deadline_s:
                    raise DeadlineExceeded("the deadline passed") from None
                waited_s = round(until_s - began_s, 1)
                raise Unavailable(
                    f"no worker came within {waited_s:g} s", retry_after_ms=self._retry_after_ms
                ) from None
        return limits

    @property
    def _wait_s(self) -> float:
        """What comes now waits for so long."""
        return self._wait_policy.wait_s(has_scheduler=self.is_open)

    def submit(self, sequences: Seq[Sequence], cached: CachedTokens) -> None:
        """All samples of one work, in order."""
        group = tuple(sequences)
        if group[0].prompt_request.is_beam_search:
            for sequence in group:
                sequence.group = group
        self._place(group, cached)

    def cancel(self, sequences: Seq[Sequence], reason: FinishReason) -> None:
        """Nothing more comes from these, wherever they are."""
        for sequence in sequences:
            sequence.is_active = False
        for session in {sequence.session for sequence in sequences if sequence.session is not None}:
            session.cancel([sequence for sequence in sequences if sequence.session is session], reason)
        self.pending.remove(sequences)
        self.retrying.remove(sequences)

    def _place(self, group: Group, cached: CachedTokens = NO_CACHED_TOKENS) -> None:
        """A group that cannot be sent for a fault of ours ends with that, and disturbs nobody else."""
        wanted = tuple(sequence for sequence in group if sequence.is_active)
        if not wanted:
            return
        try:
            self._send(wanted, cached)
        except Exception:
            log.exception("a request cannot be submitted", request=wanted[0].prompt_request.request_id)
            self.cancel(wanted, finish_pb2.FINISH_REASON_CANCELLED)
            for sequence in wanted:
                self._fail(sequence, Internal("internal error"))

    def _send(self, wanted: Group, cached: CachedTokens) -> None:
        work = wanted[0].prompt_request
        session = choose(self.sessions, work.max_total_tokens, cached, work.affinity_key)
        if session is None:
            self.pending.add(wanted, self._wait_s, self._wait_policy.max_wait_s)
        else:
            session.submit(wanted, cached.get(session.scheduler_id, 0))

    def _resubmit(self, sequences: Seq[Sequence]) -> None:
        self._metrics.resubmitted.inc(len(sequences))
        for group in _groups(sequences):
            for sequence in group:
                sequence.mark_migrating()
            self._place(group)

    def on_open(self, session: Session) -> None:
        self.sessions.append(session)
        self._metrics.sessions_open.set(len(self.sessions))
        self._seen_s = asyncio.get_running_loop().time()
        self.pending.extend_waits(self._wait_s)
        self.on_view(session)

    def find_session(self, welcome: pb.SchedulerWelcome) -> Session | None:
        lifetime = welcome.scheduler_id, welcome.epoch
        return next((s for s in self.sessions if (s.scheduler_id, s.epoch) == lifetime), None)

    def on_broken(self, session: Session) -> None:
        self.sessions.remove(session)
        self._limits = self._common_limits()
        self._seen_s = asyncio.get_running_loop().time()
        orphans = session.abandon()
        self._feed(session)
        self._metrics.sessions_open.set(len(self.sessions))
        if orphans:
            log.warning("sequences go on elsewhere", scheduler=session.scheduler_id, sequences=len(orphans))
        self._resubmit(orphans)
        self._notify()

    def on_view(self, session: Session) -> None:
        self._limits = self._common_limits()
        self._share_weights()
        if is_usable(session.view):
            for group in self.pending.take_all():
                self._place(group)
        if session.view.num_workers:
            self._feed(session)
        elif session not in self._starving:
            loop = asyncio.get_running_loop()
            self._starving[session] = loop.call_later(self._wait_s, self._starve, session)
        self._move_starving()
        self._notify()

    def _common_limits(self) -> ClusterLimits | None:
        """Every request asks for them, so they are put together when a session comes, goes or has another view."""
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
        )

    def _feed(self, session: Session) -> None:
        """It has workers again, or is gone."""
        if (timer := self._starving.pop(session, None)) is not None:
            timer.cancel()

    def _move_starving(self) -> None:
        """Sequences whose scheduler lost all its workers go to one that has some."""
        if self.limits is None:
            return
        for session in self._starving:
            sequences = list(session.live.values())
            session.cancel(sequences, finish_pb2.FINISH_REASON_CANCELLED)
            self._resubmit(sequences)

    def _starve(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        idle_until_s = session.last_tokens_s + self._wait_s
        if idle_until_s > loop.time():  # a worker on its way out still finishes what it has
            self._starving[session] = loop.call_at(idle_until_s, self._starve, session)
            return
        del self._starving[session]
        sequences = tuple(session.live.values())
        session.cancel(sequences, finish_pb2.FINISH_REASON_CANCELLED)
        self._fail_for_want_of_workers(sequences)

    def _share_weights(self) -> None:
        """A scheduler that was away when the others changed theirs hears of it from those who know all."""
        newest = max((session.view.weights for session in self.sessions), key=lambda weights: weights.update)
        for session in self.sessions:
            session.send_weights(newest)

    def on_resumed(self, sequence: Sequence, now: float) -> None:
        assert sequence.migrating_since_s is not None
        self._metrics.migration.observe(now - sequence.migrating_since_s)
        sequence.migrating_since_s = None

    def on_tokens_delivered(self, seconds: float) -> None:
        self._metrics.detokenize.observe(seconds)

    def on_refused(self, sequence: Sequence, error: QuireError) -> None:
        """A scheduler that is leaving, or too full for a stream already under way, is asked again or avoided."""
        if not sequence.is_active:
            return
        try:
            self._ask_again(sequence, error)
        except Exception:
            log.exception("a request cannot be submitted again", request=sequence.prompt_request.request_id)
            self._fail(sequence, Internal("internal error"))

    def _ask_again(self, sequence: Sequence, error: QuireError) -> None:
        now = asyncio.get_running_loop().time()
        passing = isinstance(error, Unavailable) or (isinstance(error, ResourceExhausted) and not sequence.is_new)
        sequence.refused_since_s = sequence.refused_since_s or now
        if passing and sequence.group and sequence is not sequence.group[0]:
            return  # they are asked again together
        if not passing or now - sequence.refused_since_s > self._wait_policy.outage_s:
            self._fail(sequence, error)
        else:
            pause_s = error.retry_after_ms / 1000 or REFUSAL_PAUSE_S
            self.retrying.add(sequence.group or (sequence,), pause_s, pause_s)

    def _fail_for_want_of_workers(self, group: Group) -> None:
        for sequence in group:
            if sequence.is_active:
                self._fail(sequence, self._no_worker())

    def _no_worker(self) -> Unavailable:
        return Unavailable("no worker can take this request now", retry_after_ms=self._retry_after_ms)

    def _fail(self, sequence: Sequence, error: QuireError) -> None:
        sequence.is_active = False
        now = asyncio.get_running_loop().time()
        try:
            sequence.sink.on_end(error_end(error), now)
        except Exception:  # others of the same step have to hear of theirs
            log.exception("the end of a request went wrong", request=sequence.prompt_request.request_id)

    def _notify(self) -> None:
        """Wakes everybody in changed(); later callers wait for the next change."""
        self._changed.set()
        self._changed = asyncio.Event()


def _common_adapters(views: Seq[pb.ClusterView]) -> dict[str, bytes]:
    """Those that are the same everywhere, by content as well."""
    found = [adapter_ids.digests_by_name(view.adapters, view.adapter_digests) for view in views]
    return dict(set.intersection(*(set(adapters.items()) for adapters in found)))


def _common_libraries(views: Seq[pb.ClusterView]) -> tuple[str, ...]:
    """In the order of the first. Clusters with none in common take the first one's, and say no to what they cannot."""
    first, *others = (tuple(view.structured_output_backends) or (LLGUIDANCE,) for view in views)
    return tuple(name for name in first if all(name in names for names in others)) or first


def _groups(sequences: Seq[Sequence]) -> Iterator[Group]:
    """Those that go somewhere together: the results of a beam search, for which there is one search; others alone."""
    for _, members in groupby(
        sequences, key=lambda s: id(s.prompt_request) if s.prompt_request.is_beam_search else id(s)
    ):
        yield tuple(members)
