"""The scheduler's part of request traces: one span per sequence, with its state changes as events."""

from __future__ import annotations

from collections.abc import Callable

from quire.services.scheduler.core.plan import Events
from quire.services.scheduler.core.sequences.sequence import Sequence
from quire.services.scheduler.replicas.replica import Replica
from quire.shared.pb.worker.v1 import worker_pb2
from quire.shared.tracing import Attributes, NoTraces, Span


class RequestTraces:
    """Spans of sampled sequences, which are few: for the others a call is one lookup in an empty table."""

    def __init__(self, traces: NoTraces, clock: Callable[[], float]) -> None:
        self._traces = traces
        self._clock = clock
        self._spans: dict[int, Span] = {}  # by sequence key

    def on_submitted(self, sequence: Sequence, traceparent: str) -> None:
        """Begins the span of a sequence; does nothing without a traceparent, as for requests that are not sampled."""
        if not traceparent:  # frontends send it only for sampled requests
            return
        now = self._clock()
        span = self._traces.begin("schedule", traceparent, now, now)
        if span is not None:
            self._spans[sequence.key] = span

    def on_step_result(self, replica: Replica, result: worker_pb2.StepResult) -> None:
        """Adds an event to each sampled sequence that runs on the worker; called before the result is applied."""
        if not self._spans:
            return
        now, timings = self._clock(), result.timings
        attributes: Attributes = {
            "quire.worker": replica.id,
            "quire.step_id": result.step_id,
            "quire.step.wait_us": timings.wait_us,
            "quire.step.prepare_us": timings.prepare_us,
            "quire.step.forward_us": timings.forward_us,
            "quire.step.sample_us": timings.sample_us,
            "quire.running": len(replica.core.running),
        }
        for key, span in self._spans.items():
            sequence = replica.core.find(key)
            if sequence is not None and sequence.was_admitted:
                span.event("step", now, attributes)

    def on_events(self, events: Events, worker_of: Callable[[int], str]) -> None:
        """Adds admissions to the spans of sampled sequences and ends the spans of those that have finished.
        `worker_of`: returns the worker's id by sequence key."""
        if not self._spans:
            return
        now = self._clock()
        for started in events.started:
            span = self._spans.get(started.sequence.key)
            if span is not None:
                where = {"quire.worker": worker_of(started.sequence.key)}
                cached = {"quire.cached_tokens": started.sequence.num_cached_tokens}
                span.event("admitted", now, {**where, **cached, "quire.queue_s": started.queued_s})
        for finished in events.finished:
            span = self._spans.pop(finished.sequence.key, None)
            if span is not None:
                what: Attributes = {
                    "quire.finish_reason": finished.reason.name.lower(),
                    "quire.preemptions": finished.sequence.num_preemptions,
                    "quire.worker_losses": len(finished.sequence.losses),
                }
                span.end(now, what, "" if finished.failure is None else finished.failure.code)

    def on_moved(self, sequence: Sequence) -> None:
        """Adds an event to a sequence whose worker was lost or leaves."""
        span = self._spans.get(sequence.key)
        if span is not None:
            span.event("moved", self._clock(), {"quire.worker_losses": len(sequence.losses)})
