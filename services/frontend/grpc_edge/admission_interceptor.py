"""Admission of gRPC calls: calls beyond the limits are refused by their headers, before any message is read; the
counterpart of http/middleware/admission_middleware.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
import grpc.aio
from grpc_status import rpc_status

from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.grpc_edge.errors import Context, RefusalRecorder, status_of
from quire.shared.errors import QuireError
from quire.shared.rpc.guard import metadata_of

# Methods that acquire a lease first. In a stream of requests, each request is refused separately instead.
INFERENCE_METHODS = frozenset(
    {
        *(
            f"/quire.inference.v1.InferenceService/{method}"
            for method in ("Generate", "Chat", "Embed", "EmbedStream", "Classify", "Score", "Rerank", "Transcribe")
        ),
        "/inference.GRPCInferenceService/ModelInfer",
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.grpc.engine.VllmEngine/Embed",
    }
)
MAX_CACHED_REFUSALS = 64

TenantOf = Callable[[dict[str, "str | bytes"]], str]
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls while the frontend is full; an accepted call may still be refused once its message has arrived."""

    def __init__(self, admission: CallAdmission, refused: RefusalRecorder, tenant_of: TenantOf) -> None:
        """Stores the callbacks. `refused`: records a refused call; `tenant_of`: returns the tenant of a call's
        metadata."""
        self._admission = admission
        self._refused = refused
        self._tenant_of = tenant_of
        self._handlers: dict[tuple[type[QuireError], str], AnyHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        """Returns a handler that refuses an inference call while its tenant's limits are reached, before its message is
        read; otherwise the next handler."""
        if handler_call_details.method in INFERENCE_METHODS:
            try:
                tenant = self._tenant_of(metadata_of(handler_call_details.invocation_metadata))
                self._admission.check_open(0, tenant)
            except QuireError as error:
                self._refused(handler_call_details.method, error)
                return self._refusing_handler(error)
        return await continuation(handler_call_details)

    def _refusing_handler(self, error: QuireError) -> AnyHandler:
        """Returns a handler that refuses; cached, since hundreds of calls get the same refusal while the frontend is
        full."""
        key = (type(error), error.message)
        if key not in self._handlers:
            if len(self._handlers) >= MAX_CACHED_REFUSALS:
                self._handlers.clear()
            self._handlers[key] = _answering_with(error)
        return self._handlers[key]


def _answering_with(error: QuireError) -> AnyHandler:
    """Returns a handler that aborts each call with the error's status, without reading its message."""
    status = rpc_status.to_status(status_of(error))

    async def refuse(_messages: Any, context: Context) -> None:
        await context.abort_with_status(status)

    return grpc.stream_stream_rpc_method_handler(refuse)  # a stream handler never reads the request message
