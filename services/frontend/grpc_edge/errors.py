"""How an error ends a call: its code, its text, and details that clients can read without parsing the text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from shared.errors import Internal, QuireError, transport
from shared.logs import logger
from shared.metrics.frontend import FrontendMetrics

log = logger("grpc_edge")

Context = grpc.aio.ServicerContext[Any, Any]


def _details(error: QuireError) -> list[any_pb2.Any]:
    messages: list[Message] = []
    if error.retry_after_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        messages.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=error.message)
        messages.append(error_details_pb2.BadRequest(field_violations=[violation]))
    packed = [any_pb2.Any() for _ in messages]
    for box, message in zip(packed, messages, strict=True):
        box.Pack(message)
    return packed


async def abort(context: Context, error: QuireError) -> NoReturn:
    code = transport(error).grpc_code
    status = status_pb2.Status(code=code.value[0], message=error.message, details=_details(error))
    await context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status has raised")


@asynccontextmanager
async def answering(method: str, context: Context, metrics: FrontendMetrics) -> AsyncIterator[None]:
    """Around a call: ends it with the error raised inside, and counts how it ended."""
    code = grpc.StatusCode.CANCELLED
    try:
        yield
        code = grpc.StatusCode.OK
    except QuireError as error:
        code = transport(error).grpc_code
        await abort(context, error)
    except Exception:
        code = grpc.StatusCode.INTERNAL
        log.exception("a call failed", method=method)
        await abort(context, Internal("internal error"))
    finally:
        metrics.grpc_requests.labels(method, code.name).inc()
