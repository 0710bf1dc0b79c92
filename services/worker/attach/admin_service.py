"""quire.admin.v1 of a worker, on its admin port: itself only."""

from __future__ import annotations

import grpc.aio

from services.worker.attach.status import Status
from shared.errors import FailedPrecondition, transport
from shared.lifecycle import Shutdown
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.admin.v1 import admin_pb2_grpc


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Status and drain; which prefixes are cached is the scheduler's to say."""

    def __init__(self, status: Status, shutdown: Shutdown) -> None:
        self._status = status
        self._shutdown = shutdown

    async def GetStatus(
        self,
        _request: pb.GetStatusRequest,
        _context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.GetStatusResponse],
    ) -> pb.GetStatusResponse:
        return pb.GetStatusResponse(services=[self._status.read()])

    async def Drain(
        self, _request: pb.DrainRequest, _context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        self._shutdown.request()
        return pb.DrainResponse()

    async def ResetPrefixCache(
        self,
        _request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[pb.ResetPrefixCacheRequest, pb.ResetPrefixCacheResponse],
    ) -> pb.ResetPrefixCacheResponse:
        error = FailedPrecondition("a worker does not own its prefix cache: ask its scheduler to reset it")
        await context.abort(transport(error).grpc_code, error.message)
        raise AssertionError("abort does not return")
