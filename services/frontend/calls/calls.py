"""The calls of clients, whichever edge they come through: each has its places, its turn, and one line in the log."""

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
REFUSALS_A_SECOND = 20  # that have a line of their own; the others are told together once the second is over


class Call:
    """One call from its headers to its end. Whatever is taken for it is given back when its `with` is left."""

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
        self.route = ""  # nobody reads of a call without one
        self.lease = admission.lease()
        self._caller: Caller | None = None
        self.address = ""  # of the client, without a port; empty: it is not known
        self.generated_id = ""  # of the answer, where there is no request
        self.started_s = asyncio.get_running_loop().time()
        self.status = ""  # the edge's own word for how it ended
        self.error: QuireError | None = None
        self.request: Request | None = None
        self.generation: MeasuredGeneration | None = None
        self.is_detached = False  # work that goes on without its client, whose own call has been counted
        self.traceparent = ""  # as the client sent it
        self.trace: Span | None = None

    @property
    def caller(self) -> Caller | None:
        """None where there are no keys."""
        return self._caller

    @caller.setter
    def caller(self, caller: Caller | None) -> None:
        """Known before a place is taken, which is one of the caller's tenant."""
        self._caller = caller
        self.lease.tenant = "" if caller is None else caller.tenant

    def begin_trace(self) -> str:
        """What to hand on; empty where the request is not sampled."""
        now = asyncio.get_running_loop().time()
        self.trace = self._calls.traces.begin("llm_request", self.traceparent, self.started_s, now)
        return "" if self.trace is None else self.trace.traceparent

    @property
    def id(self) -> str:
        """Empty while nothing has been read, and where the client's own is refused."""
        return self.request.request_id if self.request is not None else ""

    def rate_limits(self) -> list[RateLimit]:
        """Of the key that was shown; where that has none, of its tenant's places at this frontend."""
        own = [] if self.caller is None else self.caller.account.rate_limits()
        return own or self._calls.admission.rate_limits(self.lease.tenant)

    async def admit(self) -> None:
        """Takes the place of the smallest request, then waits for its turn to be worked on: whoever finds no place
        hears of it before those who have one are served. ResourceExhausted, Unavailable."""
        self.lease.acquire(1, 0)
        await self._calls.preparation_queue.wait_turn()

    async def wait_turn(self) -> None:
        """Once more, for a call that something else was waited for."""
        await self._calls.preparation_queue.wait_turn()

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.lease.release()
        if self.caller is not None and self.generation is not None:
            usage = self.generation.usage
            self.caller.account.charge(usage.prompt_tokens + usage.completion_tokens)
        if self.trace is not None:
            end_span(self, self.trace)
        self._calls.finish(self)
        self.error = None  # whose traceback leads back here: tokens of a refused prompt would stay until Python looks


class Calls:
    """Begins each, and writes its line when it has ended: who, what, how, how much, how long; never any text."""

    def __init__(
        self, admission: CallAdmission, access: Access, metrics: CallMetrics, traces: NoTraces | None = None
    ) -> None:
        self.admission = admission
        self._metrics = metrics
        self.access = access
        self.traces = traces or NoTraces()
        self.preparation_queue = PreparationQueue()
        self._num_refusals = 0  # of this second
        self._unlogged: Counter[tuple[str, str]] = Counter()  # of this second, by route and status
        self._second: asyncio.TimerHandle | None = None
        self._live: set[Call] = set()

    def oldest(self, count: int) -> list[Call]:
        """Of those with a request, that are being answered."""
        live = (call for call in self._live if call.request is not None)
        return heapq.nsmallest(count, live, key=lambda call: call.started_s)

    def begin(self) -> Call:
        """For a `with`."""
        call = Call(self, self.admission)
        self._live.add(call)
        return call

    def finish(self, call: Call) -> None:
        self._live.discard(call)
        if not call.route:
            return
        call_metrics.observe_call(self._metrics, call)
        if call.generation is not None:
            if log.is_info_enabled:
                self._tell(call, call.generation)
        elif call.error is not None or not call.status.startswith(("2", "OK")):
            self.log_refusal(call.route, call.status, call)
        else:
            log.info("request", **_who(call), status=call.status, total_ms=_total_ms(call))

    def _tell(self, call: Call, generation: MeasuredGeneration) -> None:
        usage, times = generation.usage, generation.times
        log.info(
            "request",
            **_who(call),
            status=call.status,
            **_why(call.error),
            finish=generation.finish_reasons,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            queue_ms=_ms(times.queue_s),
            first_token_ms=_ms(times.first_token_s),
            total_ms=_total_ms(call),
        )

    def log_refusal(self, route: str, status: str, call: Call | None = None) -> None:
        """A call that nothing was computed for; `call`: None where it was not even begun."""
        self.preparation_queue.note_refusal()
        if self._second is None:
            self._second = asyncio.get_running_loop().call_later(SECOND_S, self._second_is_over)
        self._num_refusals += 1
        if self._num_refusals > REFUSALS_A_SECOND:
            self._unlogged[route, status] += 1
        elif call is None:
            log.info("request", route=route, status=status)
        else:
            log.info("request", **_who(call), status=status, **_why(call.error), total_ms=_total_ms(call))

    def _second_is_over(self) -> None:
        untold, self._unlogged = self._unlogged, Counter()
        self._second, self._num_refusals = None, 0
        for (route, status), count in untold.items():
            log.info("requests like these", route=route, status=status, count=count)


def _who(call: Call) -> dict[str, str]:
    request = call.request
    known_as = call.generated_id if request is None else request.request_id
    known = {"request": truncated_name(known_as)} if known_as else {}
    known["route"] = call.route
    if call.caller is not None:
        known["key"] = call.caller.key.name
    if request is None:
        return known
    if request.tenant:
        known["tenant"] = truncated_name(request.tenant)
    if request.model:
        known["model"] = truncated_name(request.model)
    return known


def _why(error: QuireError | None) -> dict[str, str]:
    """Not its message, which may quote the request."""
    if error is None:
        return {}
    kind = {"error": type(error).__name__}
    return {**kind, "field": error.field} if error.field else kind


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 1)


def _total_ms(call: Call) -> float | None:
    return _ms(asyncio.get_running_loop().time() - call.started_s)
