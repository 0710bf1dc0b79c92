"""quire.batch.v1.BatchService, on the same store and runner as /v1/batches."""

from __future__ import annotations

from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.services.frontend.grpc_edge.requests import arrival_of, tenant
from quire.services.frontend.offline.batch import Batch
from quire.services.frontend.offline.operations import WINDOW, OfflineOperations
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.batch.v1 import batch_pb2 as pb
from quire.shared.pb.batch.v1 import batch_pb2_grpc

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["BatchService"].full_name
LISTED = 20  # default page size


class BatchService(batch_pb2_grpc.BatchServiceServicer):
    """gRPC service for batches: converts messages; the batch operations decide."""

    def __init__(self, work: OfflineOperations, metrics: FrontendMetrics, calls: Calls) -> None:
        self._work = work
        self._metrics = metrics
        self._calls = calls

    async def CreateBatch(self, message: pb.CreateBatchRequest, context: Context) -> pb.CreateBatchResponse:
        """Creates a batch of an uploaded file's requests, to run under the caller's API key."""
        async with call_context("CreateBatch", context, self._metrics, self._calls) as call:
            batch = await self._work.create(
                _tenant(message.tenant, context, call),
                "" if call.caller is None else call.caller.key.name,
                endpoint=message.endpoint,
                input_file_id=message.input_file_id,
                window=message.completion_window or WINDOW,
                metadata=message.metadata,
            )
            return pb.CreateBatchResponse(batch=_message(batch))

    async def GetBatch(self, message: pb.GetBatchRequest, context: Context) -> pb.GetBatchResponse:
        """Returns a batch of the tenant. Raises NotFound for an id that the tenant does not have."""
        async with call_context("GetBatch", context, self._metrics, self._calls) as call:
            batch, is_cancelled = await self._work.batch(message.batch_id, _tenant(message.tenant, context, call))
            return pb.GetBatchResponse(batch=_message(batch, is_cancelled=is_cancelled))

    async def ListBatches(self, message: pb.ListBatchesRequest, context: Context) -> pb.ListBatchesResponse:
        """Returns one page of the tenant's batches, those after the id `after`."""
        async with call_context("ListBatches", context, self._metrics, self._calls) as call:
            owner = _tenant(message.tenant, context, call)
            page = await self._work.list_batches(owner, message.after, message.limit or LISTED)
            return pb.ListBatchesResponse(batches=map(_message, page.shown), has_more=page.has_more)

    async def CancelBatch(self, message: pb.CancelBatchRequest, context: Context) -> pb.CancelBatchResponse:
        """Requests the cancellation of a batch of the tenant and returns it; lines in progress are still answered."""
        async with call_context("CancelBatch", context, self._metrics, self._calls) as call:
            batch = await self._work.cancel(message.batch_id, _tenant(message.tenant, context, call))
            return pb.CancelBatchResponse(batch=_message(batch, is_cancelled=True))


def _tenant(claimed: str, context: Context, call: Call) -> str:
    return tenant(claimed, arrival_of(context), call)


def _message(batch: Batch, *, is_cancelled: bool = False) -> pb.Batch:
    """Returns the batch as a message. `is_cancelled`: cancellation was requested, which changes the status of a running
    batch."""
    shown = batch.to_openai(is_cancelled=is_cancelled)
    return pb.Batch(
        id=batch.id,
        endpoint=batch.endpoint,
        input_file_id=batch.input_file_id,
        status=f"BATCH_STATUS_{shown['status'].upper()}",
        output_file_id=batch.output_file_id or "",
        error_file_id=batch.error_file_id or "",
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        moments=batch.moments,
        total=batch.total,
        completed=batch.completed,
        failed=batch.failed,
        errors=[
            pb.BatchError(
                code=error["code"], message=error["message"], line=error["line"] or 0, param=error["param"] or ""
            )
            for error in batch.errors
        ],
        metadata=batch.metadata or {},
    )
