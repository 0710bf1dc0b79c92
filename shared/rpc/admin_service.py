"""Serves quire.admin.v1 for a scheduler or a worker, on its admin port."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol, TypeVar

import grpc.aio

from quire.shared.errors import QuireError, transport
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.admin.v1 import admin_pb2_grpc
from quire.shared.process.lifecycle import Shutdown

Request = TypeVar("Request")
Response = TypeVar("Response")


class Administration(Protocol):
    """Implementation of the admin calls by a service; every method may raise QuireError."""

    def status(self) -> pb.GetStatusResponse: ...

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> pb.ResetPrefixCacheResponse:
        """Discards all cached prefixes."""

    async def pause_generation(self, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        """Pauses generation on all workers; requests wait until it is resumed."""

    async def resume_generation(self, request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        """Resumes generation on all workers after a pause."""

    async def update_weights(self, request: pb.UpdateWeightsRequest) -> pb.UpdateWeightsResponse:
        """Replaces the weights."""

    async def init_weights_update_group(
        self, request: pb.InitWeightsUpdateGroupRequest
    ) -> pb.InitWeightsUpdateGroupResponse:
        """Joins a trainer's process group."""

    async def destroy_weights_update_group(
        self, request: pb.DestroyWeightsUpdateGroupRequest
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        """Leaves a trainer's process group."""

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Releases device memory."""

    async def wake_up(self, request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        """Allocates released device memory again."""

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Loads an adapter."""

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unloads an adapter."""

    async def list_adapters(self) -> pb.ListAdaptersResponse:
        """Returns the loaded adapters."""


class AdminService(admin_pb2_grpc.AdminServiceServicer):
    """gRPC servicer that forwards the calls to an Administration."""

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
        return await _answer(self._administration.reset_prefix_cache(request), context)

    async def PauseGeneration(
        self,
        request: pb.PauseGenerationRequest,
        context: grpc.aio.ServicerContext[pb.PauseGenerationRequest, pb.PauseGenerationResponse],
    ) -> pb.PauseGenerationResponse:
        return await _answer(self._administration.pause_generation(request), context)

    async def ResumeGeneration(
        self,
        request: pb.ResumeGenerationRequest,
        context: grpc.aio.ServicerContext[pb.ResumeGenerationRequest, pb.ResumeGenerationResponse],
    ) -> pb.ResumeGenerationResponse:
        return await _answer(self._administration.resume_generation(request), context)

    async def UpdateWeights(
        self,
        request: pb.UpdateWeightsRequest,
        context: grpc.aio.ServicerContext[pb.UpdateWeightsRequest, pb.UpdateWeightsResponse],
    ) -> pb.UpdateWeightsResponse:
        return await _answer(self._administration.update_weights(request), context)

    async def InitWeightsUpdateGroup(
        self,
        request: pb.InitWeightsUpdateGroupRequest,
        context: grpc.aio.ServicerContext[pb.InitWeightsUpdateGroupRequest, pb.InitWeightsUpdateGroupResponse],
    ) -> pb.InitWeightsUpdateGroupResponse:
        return await _answer(self._administration.init_weights_update_group(request), context)

    async def DestroyWeightsUpdateGroup(
        self,
        request: pb.DestroyWeightsUpdateGroupRequest,
        context: grpc.aio.ServicerContext[pb.DestroyWeightsUpdateGroupRequest, pb.DestroyWeightsUpdateGroupResponse],
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        return await _answer(self._administration.destroy_weights_update_group(request), context)

    async def Sleep(
        self, request: pb.SleepRequest, context: grpc.aio.ServicerContext[pb.SleepRequest, pb.SleepResponse]
    ) -> pb.SleepResponse:
        return await _answer(self._administration.sleep(request), context)

    async def WakeUp(
        self, request: pb.WakeUpRequest, context: grpc.aio.ServicerContext[pb.WakeUpRequest, pb.WakeUpResponse]
    ) -> pb.WakeUpResponse:
        return await _answer(self._administration.wake_up(request), context)

    async def LoadAdapter(
        self,
        request: pb.LoadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.LoadAdapterRequest, pb.LoadAdapterResponse],
    ) -> pb.LoadAdapterResponse:
        return await _answer(self._administration.load_adapter(request), context)

    async def UnloadAdapter(
        self,
        request: pb.UnloadAdapterRequest,
        context: grpc.aio.ServicerContext[pb.UnloadAdapterRequest, pb.UnloadAdapterResponse],
    ) -> pb.UnloadAdapterResponse:
        return await _answer(self._administration.unload_adapter(request), context)

    async def ListAdapters(
        self,
        _request: pb.ListAdaptersRequest,
        context: grpc.aio.ServicerContext[pb.ListAdaptersRequest, pb.ListAdaptersResponse],
    ) -> pb.ListAdaptersResponse:
        return await _answer(self._administration.list_adapters(), context)


async def _answer(answer: Awaitable[Response], context: grpc.aio.ServicerContext[Request, Response]) -> Response:
    """Returns the answer of an admin call; aborts the gRPC call with the status of its QuireError."""
    try:
        return await answer
    except QuireError as error:
        await context.abort(transport(error).grpc_code, error.message)
        raise AssertionError("abort does not return") from None
