"""quire.admin.v1 of a scheduler or a worker, on its admin port."""

from __future__ import annotations

from typing import Protocol

import grpc.aio

from shared.errors import QuireError, transport
from shared.lifecycle import Shutdown
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.admin.v1 import admin_pb2_grpc


class Administration(Protocol):
    """What a service does for its operators."""

    def status(self) -> pb.GetStatusResponse: ...

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        """Raises QuireError."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """Status, drain, cache reset."""

    def __init__(self, administration: Administration, shutdown: Shutdown) -> None:
        self._administration = administration
        self._shutdown = shutdown

    async def GetStatus(
        self,
        _request: pb.GetStatusRequest,
        _context: grpc.aio.ServicerContext[pb.GetStatusRequest, pb.GetStatusResponse],
    ) -> pb.GetStatusResponse:
        return self._administration.status()

    async def Drain(
        self, _request: pb.DrainRequest, _context: grpc.aio.ServicerContext[pb.DrainRequest, pb.DrainResponse]
    ) -> pb.DrainResponse:
        self._shutdown.request()
        return pb.DrainResponse()

    async def ResetPrefixCache(
        self,
        request: pb.ResetPrefixCacheRequest,
        context: grpc.aio.ServicerContext[pb.ResetPrefixCacheRequest, pb.ResetPrefixCacheResponse],
    ) -> pb.ResetPrefixCacheResponse:
        try:
            return await self._administration.reset_prefix_cache(request)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)
            raise AssertionError("abort does not return") from None
