"""Client calls of all edges: each has an admission lease, a turn for preparation, and one log line."""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter

from quire.services.frontend.access.access import Access, Caller
from quire.services.frontend.access.rate_limit import RateLimit
from quire.services.frontend.calls import call_metrics
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.call_span import end_span
from quire.services.frontend.calls.measurements import MeasuredGeneration
from quire.services.frontend.calls.preparation_queue import PreparationQueue
from quire.services.frontend.request.request import Request
from quire.shared.errors import QuireError, truncated_name
from quire.shared.logs import logger
from quire.shared.metrics.calls import CallMetrics
from quire.shared.tracing import NoTraces, Span

log = logger("calls")

SECOND_S = 1.0
REFUSALS_A_SECOND = 20  # refusals logged one by one; further ones of that second are logged as a count


class Call:
    """One call, from its headers to its end. Leaving its `with` releases everything acquired for it."""

    __slots__ = (
        "_caller",
        "_calls",
        "address",
        "error",
        "generated_id",
        "generation",
        "is_detached",
        "lease",
        "request",
        "route",
        "started_s",
        "status",
        "trace",
        "traceparent",
    )

    def __init__(self, calls: Calls, admission: CallAdmission) -> None:
        self._calls = calls
        self.route = ""  # calls without a route are not logged
        self.lease = admission.lease()
        self._caller: Caller | None = None
        self.address = ""  # client address without port; empty: unknown
        self.generated_id = ""  # id of the answer, if no request was read
        self.started_s = asyncio.get_running_loop().time()
        self.status = ""  # HTTP status or gRPC code name
        self.error: QuireError | None = None
        self.request: Request | None = None
        self.generation: MeasuredGeneration | None = None
        self.is_detached = False  # runs without its client, whose own call is counted separately
        self.traceparent = ""  # as the client sent it
        self.trace: Span | None = None

    @property
    def caller(self) -> Caller | None:
        """The authenticated caller; None without API keys."""
        return self._caller

    @caller.setter
    def caller(self, caller: Caller | None) -> None:
        """Sets the caller before anything is acquired, since the lease is charged to its tenant."""
        self._caller = caller
        self.lease.tenant = "" if caller is None else caller.tenant

    def begin_trace(self) -> str:
        """Starts the call's span. Returns the trace context for the scheduler; empty if the request is not traced."""
        now = asyncio.get_running_loop().time()
        self.trace = self._calls.traces.begin("llm_request", self.traceparent, self.started_s, now)
        return "" if self.trace is None else self.trace.traceparent

    @property
    def id(self) -> str:
        """The request id; empty until the request is read, or if the client's id was refused."""
        return self.request.request_id if self.request is not None else ""

    def rate_limits(self) -> list[RateLimit]:
        """Returns the limits of the API key, or, if it has none, those of its tenant at this frontend."""
        of_key = [] if self.caller is None else self.caller.account.rate_limits()
        return of_key or self._calls.admission.rate_limits(self.lease.tenant)

    async def admit(self) -> None:
        """Acquires one sample, then waits for its turn to be prepared: refused calls are answered before admitted ones
        are processed. Raises ResourceExhausted, Unavailable."""
        self.lease.acquire(1, 0)
        await self.wait_turn()

    async def wait_turn(self) -> None:
        """Waits for the next turn of its client, also after the call waited for something else."""
        await self._calls.preparation_queue.wait_turn(self.client)

    @property
    def client(self) -> str:
        """Name under which the call takes turns with others: the tenant, or the address of a client without one."""
        return self.lease.tenant or self.address

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        """Releases the lease, charges the tokens to the key's account, ends the trace span, and logs and counts the
        call."""
        self.lease.release()
        if self.caller is not None and self.generation is not None:
            usage = self.generation.usage
            self.caller.account.charge(usage.prompt_tokens + usage.completion_tokens)
        if self.trace is not None:
            end_span(self, self.trace)
        self._calls.record_end(self)
        # The error's traceback references this frame: it would keep a refused prompt's tokens until garbage collection.
        self.error = None


class Calls:
    """Starts calls and logs each when it has ended: identity, outcome, token counts and times, never any text."""

    def __init__(
        self,
        admission: CallAdmission,
        access: Access,
        metrics: CallMetrics,
        traces: NoTraces | None = None,
        *,
        interval_s: float = SECOND_S,
    ) -> None:
        """Stores the collaborators. `traces`: starts the spans of traced calls; None: no traces. `interval_s`: time in
        which REFUSALS_A_SECOND are logged one by one."""
        self._interval_s = interval_s
        self.admission = admission
        self._metrics = metrics
        self.access = access
        self.traces = traces or NoTraces()
        self.preparation_queue = PreparationQueue()
        self._num_refusals = 0  # in this second
        self._unlogged: Counter[tuple[str, str]] = (
            Counter()
        )  # refusals of this second without a log line, by route and status
        self._refusal_timer: asyncio.TimerHandle | None = None
        self._live: set[Call] = set()

    def oldest(self, count: int) -> list[Call]:
        """Returns the `count` longest-running calls that have a request."""
        live = (call for call in self._live if call.request is not None)
        return heapq.nsmallest(count, live, key=lambda call: call.started_s)

    def begin(self) -> Call:
        """Returns a new call for use in a `with`, and lists it as live until that ends."""
        call = Call(self, self.admission)
        self._live.add(call)
        return call

    def record_end(self, call: Call) -> None:
        """Records the metrics of an ended call and logs it; a call without a route (pages, probes) is only
        forgotten."""
        self._live.discard(call)
        if not call.route:
            return
        call_metrics.observe_call(self._metrics, call)
        if call.generation is not None:
            if log.is_info_enabled:
                self._log_generation(call, call.generation)
        elif call.error is not None or not call.status.startswith(("2", "OK")):
            self.log_refusal(call.route, call.status, call)
        else:
            log.info("request", **_identity(call), status=call.status, total_ms=_total_ms(call))

    def _log_generation(self, call: Call, generation: MeasuredGeneration) -> None:
        """Logs a call that computed something: its end, token counts and times in milliseconds."""
        usage, times = generation.usage, generation.times
        log.info(
            "request",
            **_identity(call),
            status=call.status,
            **_error_fields(call.error),
            finish=generation.finish_reasons,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=_ms(times.queue_s),
            first_token_ms=_ms(times.first_token_s),
            total_ms=_total_ms(call),
        )

    def log_refusal(self, route: str, status: str, call: Call | None = None, tenant: str = "") -> None:
        """Logs a call for which nothing was computed, at most REFUSALS_A_SECOND one by one and the others as counts,
        and lets further refusals of its client go first. `call`: None if it was refused before it started; `tenant`:
        then the tenant, if known."""
        self.preparation_queue.note_refusal(tenant or None if call is None else call.client)
        if self._refusal_timer is None:
            self._refusal_timer = asyncio.get_running_loop().call_later(self._interval_s, self._log_refusal_counts)
        self._num_refusals += 1
        if self._num_refusals > REFUSALS_A_SECOND:
            self._unlogged[route, status] += 1
        elif call is None:
            log.info("request", route=route, status=status)
        else:
            log.info("request", **_identity(call), status=status, **_error_fields(call.error), total_ms=_total_ms(call))

    def _log_refusal_counts(self) -> None:
        """Logs how many refusals of each route and status were not logged one by one, and starts a new interval."""
        untold, self._unlogged = self._unlogged, Counter()
        self._refusal_timer, self._num_refusals = None, 0
        for (route, status), count in untold.items():
            log.info("requests of this route since the last line", route=route, status=status, count=count)


def _identity(call: Call) -> dict[str, str]:
    """Returns the log fields that identify a call, those that are known: request id, route, key, tenant, model."""
    request = call.request
    request_id = call.generated_id if request is None else request.request_id
    fields = {"request": truncated_name(request_id)} if request_id else {}
    fields["route"] = call.route
    if call.caller is not None:
        fields["key"] = call.caller.key.name
    if request is None:
        return fields
    if request.tenant:
        fields["tenant"] = truncated_name(request.tenant)
    if request.model:
        fields["model"] = truncated_name(request.model)
    return fields


def _error_fields(error: QuireError | None) -> dict[str, str]:
    """Returns the error's class and field, not its message, which may quote the request."""
    if error is None:
        return {}
    kind = {"error": type(error).__name__}
    return {**kind, "field": error.field} if error.field else kind


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _total_ms(call: Call) -> float | None:
    return _ms(asyncio.get_running_loop().time() - call.started_s)
