"""Calls that nothing has room for are refused from their headers: no message is read, nothing is parsed. As for HTTP,
http/middleware/door.py."""

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

# Whose first act it is to take a place. The messages of a stream of them are refused one by one.
WORK = frozenset(
    {
        *(
            f"/quire.inference.v1.InferenceService/{method}"
            for method in ("Generate", "Chat", "Embed", "EmbedStream", "Classify", "Score", "Rerank")
        ),
        "/inference.GRPCInferenceService/ModelInfer",
        "/vllm.grpc.engine.VllmEngine/Generate",
        "/vllm.grpc.engine.VllmEngine/Embed",
    }
)
MAX_WORDED = 64  # refusals that are kept as they are written

TenantOf = Callable[[dict[str, "str | bytes"]], str]
AnyHandler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"


class AdmissionInterceptor(grpc.aio.ServerInterceptor):
    """A call that it lets in may still find the last place taken once its message is there."""

    def __init__(self, admission: CallAdmission, refused: RefusalRecorder, tenant_of: TenantOf) -> None:
        """`refused` hears of calls that are; `tenant_of`: a call's metadata, once its key has been checked."""
        self._admission = admission
        self._refused = refused
        self._tenant_of = tenant_of
        self._worded: dict[tuple[type[QuireError], str], AnyHandler] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[AnyHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> AnyHandler | None:
        if handler_call_details.method in WORK:
            try:
                tenant = self._tenant_of(metadata_of(handler_call_details.invocation_metadata))
                self._admission.check_open(0, tenant)
            except QuireError as error:
                self._refused(handler_call_details.method, error)
                return self._refusing(error)
        return await continuation(handler_call_details)

    def _refusing(self, error: QuireError) -> AnyHandler:
        """While there is no room, hundreds are told the same."""
        key = (type(error), error.message)
        if key not in self._worded:
            if len(self._worded) >= MAX_WORDED:
                self._worded.clear()
            self._worded[key] = _answering_with(error)
        return self._worded[key]


def _answering_with(error: QuireError) -> AnyHandler:
    status = rpc_status.to_status(status_of(error))

    async def refuse(_messages: Any, context: Context) -> None:
        await context.abort_with_status(status)

    return grpc.stream_stream_rpc_method_handler(refuse)  # of streams, whatever it answers: their messages stay unread
