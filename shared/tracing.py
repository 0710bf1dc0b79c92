"""Request traces across services: W3C trace contexts (www.w3.org/TR/trace-context) in, spans out over OTLP.

Requires the packages of the extra `tracing`. Without an endpoint none of them is imported and nothing is measured:
for a request that is not sampled, services keep None.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire.shared.errors import InvalidArgument
from quire.shared.settings.base import Settings
from quire.shared.version import VERSION

MAX_EVENTS = 100  # per span; OpenTelemetry's own limit is 128
LAST_SPANS_MS = 2000  # time to send the remaining spans at shutdown
TRACEPARENT = "traceparent"
Attributes = Mapping[str, str | int | float | bool]


class ClockPair(NamedTuple):
    """The same instant on the wall clock and the event loop's clock."""

    wall_ns: int
    loop_s: float

    @classmethod
    def now(cls, loop_s: float) -> ClockPair:
        return cls(time.time_ns(), loop_s)

    def wall(self, loop_s: float) -> int:
        return self.wall_ns + round((loop_s - self.loop_s) * 1e9)


class Span:
    """One service's part of a request. All times are the event loop's, in seconds."""

    def __init__(self, tracer: Any, span: Any, moment: ClockPair) -> None:
        self._tracer = tracer
        self._span = span
        self._moment = moment
        self._num_events = 0

    @property
    def traceparent(self) -> str:
        """Trace context to pass to the next service."""
        context = self._span.get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def event(self, name: str, at_s: float, attributes: Attributes) -> None:
        if self._num_events < MAX_EVENTS:
            self._num_events += 1
            self._span.add_event(name, dict(attributes), self._moment.wall(at_s))

    def part(self, name: str, begin_s: float, end_s: float) -> None:
        """Adds a completed child span from `begin_s` to `end_s`, which counts as at least `begin_s`."""
        trace = importlib.import_module("opentelemetry.trace")
        context = trace.set_span_in_context(self._span)
        child = self._tracer.start_span(name, context=context, start_time=self._moment.wall(begin_s))
        child.end(self._moment.wall(max(begin_s, end_s)))

    def end(self, at_s: float, attributes: Attributes, error: str = "") -> None:
        """Sets the attributes, and the error status if `error` is not empty, and ends the span, which queues it for
        sending."""
        self._span.set_attributes(dict(attributes))
        if error:
            status = importlib.import_module("opentelemetry.trace.status")
            self._span.set_status(status.Status(status.StatusCode.ERROR, error))
        self._span.end(self._moment.wall(at_s))


class NoTraces:
    """Traces when no endpoint is configured: does nothing."""

    def begin(self, name: str, traceparent: str, at_s: float, loop_s: float) -> Span | None:
        return None

    def close(self) -> None:
        """Sends nothing, because no span was recorded."""


class Traces(NoTraces):
    """Sends spans in batches from OpenTelemetry's own thread; spans that cannot be sent are dropped."""

    def __init__(self, endpoint: str, ratio: float, service: str, instance: str) -> None:
        """Raises InvalidArgument if packages are missing. `ratio`: sampled share of requests without a sampling
        decision."""
        try:
            sdk = importlib.import_module("opentelemetry.sdk.trace")
            export = importlib.import_module("opentelemetry.sdk.trace.export")
            sampling = importlib.import_module("opentelemetry.sdk.trace.sampling")
            resources = importlib.import_module("opentelemetry.sdk.resources")
            otlp = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
        except ImportError as error:
            message = f"otlp_traces_endpoint: {error.name} is not installed; pip install 'quire[tracing]'"
            raise InvalidArgument(message, field="otlp_traces_endpoint") from None
        names = {"service.name": service, "service.instance.id": instance, "service.version": VERSION}
        self._provider = sdk.TracerProvider(
            sampler=sampling.ParentBased(sampling.TraceIdRatioBased(ratio)),
            resource=resources.Resource.create(names),
            shutdown_on_exit=False,
        )
        exporter = otlp.OTLPSpanExporter(endpoint=endpoint, insecure=not endpoint.startswith("https://"))
        self._provider.add_span_processor(export.BatchSpanProcessor(exporter, schedule_delay_millis=500))
        self._tracer = self._provider.get_tracer("quire", VERSION)
        self._trace = importlib.import_module("opentelemetry.trace")
        self._context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")

    def begin(self, name: str, traceparent: str, at_s: float, loop_s: float) -> Span | None:
        """Starts a span; None for a request that is not sampled. `traceparent`: as received; may be empty or
        malformed."""
        carrier = {TRACEPARENT: traceparent} if traceparent else {}
        above = self._context.TraceContextTextMapPropagator().extract(carrier)
        moment = ClockPair.now(loop_s)
        span = self._tracer.start_span(
            name, context=above, kind=self._trace.SpanKind.SERVER, start_time=moment.wall(at_s)
        )
        return Span(self._tracer, span, moment) if span.is_recording() else None

    def close(self) -> None:
        self._provider.force_flush(LAST_SPANS_MS)
        self._provider.shutdown()


def open_traces(settings: Settings) -> NoTraces:
    """Returns the traces of a service: NoTraces without an endpoint in the settings. Raises InvalidArgument if
    OpenTelemetry's packages are missing."""
    if not settings.otlp_traces_endpoint:
        return NoTraces()
    ratio = settings.otlp_traces_ratio
    return Traces(settings.otlp_traces_endpoint, ratio, f"quire-{settings.service}", settings.name)
