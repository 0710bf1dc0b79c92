"""Ends calls with an error: status code, message, and details that clients can read without parsing the message."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Container
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from quire.services.frontend.calls.calls import Call, Calls
from quire.shared.errors import DeadlineExceeded, Internal, QuireError, transport
from quire.shared.logs import logger
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.rpc.guard import metadata_of
from quire.shared.tracing import TRACEPARENT

log = logger("grpc_edge")

ADMIN = frozenset(
    {
        "GetStatus",
        "Drain",
        "ResetPrefixCache",
        "PauseGeneration",
        "ResumeGeneration",
        "UpdateWeights",
        "StreamWeights",
        "InitWeightsUpdateGroup",
        "DestroyWeightsUpdateGroup",
        "Sleep",
        "WakeUp",
        "LoadAdapter",
        "UnloadAdapter",
        "ListAdapters",
    }
)  # methods of AdminService, on the operators' port with its own key
UNKNOWN = "none"  # metric label of all unknown methods
UNLOGGED = frozenset({"GetStatus"})  # polled by operators
MESSAGE_BYTES = 1000
MOMENT_S = 0.05  # a call this close to its deadline counts as expired
GRPC_ENDS_WITHIN_S = 10.0  # gRPC takes milliseconds to end an expired call
Context = grpc.aio.ServicerContext[Any, Any]


def _trailer_message(error: QuireError) -> str:
    """Returns the message, shortened so that the trailers stay below 8 KiB: they contain it twice, partly
    percent-encoded at three bytes per byte. Beyond that limit a client gets RESOURCE_EXHAUSTED instead."""
    text = error.message.encode()
    if len(text) <= MESSAGE_BYTES:
        return error.message
    half = MESSAGE_BYTES // 2
    return f"{text[:half].decode(errors='ignore')} ... {text[-half:].decode(errors='ignore')}"


def _details(error: QuireError) -> list[any_pb2.Any]:
    """Returns the status details: RetryInfo if the error has a hint, BadRequest if it names a field."""
    messages: list[Message] = []
    if error.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_trailer_message(error))
        messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = [any_pb2.Any() for _ in messages]
    for box, message in zip(packed, messages, strict=True):
        box.Pack(message)
    return packed


class RefusalRecorder:
    """Counts and logs calls that end before a handler runs."""

    def __init__(self, metrics: FrontendMetrics, calls: Calls, known: Container[str]) -> None:
        """Stores the metrics. `known`: method paths that may become metric labels."""
        self._metrics = metrics
        self._calls = calls
        self._known = known

    def __call__(self, path: str, error: QuireError) -> None:
        """Counts and logs a call of the method `path` that ended with `error`; unknown methods share one label."""
        method = path.rpartition("/")[2] if path in self._known else UNKNOWN
        code = transport(error).grpc_code.name
        self._metrics.grpc_requests.labels(method, code).inc()
        self._calls.log_refusal(method, code)


def status_of(error: QuireError) -> status_pb2.Status:
    code = transport(error).grpc_code
    return status_pb2.Status(code=code.value[0], message=_trailer_message(error), details=_details(error))


async def abort(context: Context, error: QuireError) -> NoReturn:
    """Ends the call with the error's status and details; never returns. For DeadlineExceeded it first leaves gRPC the
    time to end a call whose deadline is about to pass."""
    if isinstance(error, DeadlineExceeded):
        await _wait_for_grpc_deadline(context)
    await context.abort_with_status(rpc_status.to_status(status_of(error)))
    raise AssertionError("abort_with_status has raised")


async def _wait_for_grpc_deadline(context: Context) -> None:
    """Waits until gRPC ends a call whose own deadline passes: both sides end it with the same code. A status sent at
    that moment would conflict, and gRPC leaks some 50 bytes for each."""
    left_s = None if getattr(context, "ends_with_its_status", False) else context.time_remaining()
    if left_s is not None and left_s < MOMENT_S:
        await asyncio.sleep(GRPC_ENDS_WITHIN_S)


@asynccontextmanager
async def call_context(
    method: str,
    context: Context,
    metrics: FrontendMetrics,
    calls: Calls,
    end: Callable[[Context, QuireError], Awaitable[None]] = abort,
) -> AsyncIterator[Call]:
    """Surrounds a call, or one request of a stream: counts and logs how it ended and releases its lease. Only then is
    the error raised inside sent to the client, which may call again at once."""
    code, reported = grpc.StatusCode.CANCELLED, None
    with calls.begin() as call:
        try:
            metadata = metadata_of(context.invocation_metadata())
            call.address = context.peer().rpartition(":")[0]
            call.traceparent = str(metadata.get(TRACEPARENT, ""))
            if method not in ADMIN:
                call.caller = calls.access.caller_from_metadata(metadata)
            yield call
            code = grpc.StatusCode.OK
        except QuireError as error:
            code, call.error, reported = transport(error).grpc_code, error, error
        except Exception as fault:
            code, call.error = grpc.StatusCode.INTERNAL, Internal(type(fault).__name__)
            reported = Internal("internal error")
            log.exception("call failed", method=method, request=call.id)
        finally:
            call.route, call.status = "" if method in UNLOGGED else method, code.name
            metrics.grpc_requests.labels(method, code.name).inc()
    if reported is None:
        return
    try:
        await end(context, reported)
    finally:
        del reported  # its traceback references this frame
