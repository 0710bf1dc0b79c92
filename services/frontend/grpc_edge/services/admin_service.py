"""quire.admin.v1.AdminService of a frontend: its own status, and operations on the whole cluster."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable

from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.calls.calls import Call, Calls
from quire.services.frontend.grpc_edge.errors import Context, call_context
from quire.services.frontend.operations.adapter_operator import AdapterOperator
from quire.services.frontend.operations.scheduler_admins import SchedulerAdmins
from quire.services.frontend.scheduler_client.client import SchedulerClient
from quire.shared.errors import InvalidArgument, truncated_name
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.admin.v1 import admin_pb2_grpc
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.process.lifecycle import Shutdown
from quire.shared.version import VERSION

NUM_OLDEST = 10  # calls listed in the status


class FrontendStatus:
    """Builds the status of this frontend, as operators and the console see it."""

    def __init__(
        self,
        name: str,
        address: str,
        admission: CallAdmission,
        client: SchedulerClient,
        *,
        shutdown: Shutdown,
        calls: Calls,
    ) -> None:
        self._name = name
        self._address = address
        self._admission = admission
        self._client = client
        self._shutdown = shutdown
        self._calls = calls

    def __call__(self) -> pb.ServiceStatus:
        """Returns the status: identity, state, running samples, waiting submissions, and the NUM_OLDEST longest-running
        calls."""
        return pb.ServiceStatus(
            role=pb.ROLE_FRONTEND,
            id=self._name,
            pid=os.getpid(),
            address=self._address,
            state=self._state(),
            running=self._admission.num_samples,
            waiting=self._client.num_waiting,
            version=VERSION,
            oldest_calls=[_call(call) for call in self._calls.oldest(NUM_OLDEST)],
        )

    def _state(self) -> pb.State:
        if self._shutdown.requested:
            return pb.STATE_DRAINING
        return pb.STATE_READY if self._client.is_open else pb.STATE_STARTING


def _call(call: Call) -> pb.CallStatus:
    """Returns the status of one running call; with token counts if its generation has begun."""
    assert call.request is not None
    status = pb.CallStatus(
        request_id=truncated_name(call.id),
        tenant=truncated_name(call.request.tenant),
        age_s=asyncio.get_running_loop().time() - call.started_s,
    )
    if call.generation is not None:
        usage = call.generation.usage
        status.prompt_tokens, status.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    return status


class FrontendAdminService(admin_pb2_grpc.AdminServiceServicer):
    """Operators' gRPC service: answers for this frontend and relays operations to the schedulers."""

    def __init__(
        self,
        status: FrontendStatus,
        schedulers: SchedulerAdmins,
        shutdown: Shutdown,
        metrics: FrontendMetrics,
        calls: Calls,
        *,
        adapters: AdapterOperator,
    ) -> None:
        self._status = status
        self.schedulers = schedulers
        self.adapters = adapters
        self._shutdown = shutdown
        self._metrics = metrics
        self._calls = calls

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:
        async with call_context("GetStatus", context, self._metrics, self._calls):
            return pb.GetStatusResponse(services=await self.services())

    async def services(self) -> list[pb.ServiceStatus]:
        """Returns the status of all services of the cluster, this one first."""
        return _once_each([self._status(), *await self.schedulers.status()])

    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """Requests the shutdown of this frontend, which drains first; returns at once."""
        async with call_context("Drain", context, self._metrics, self._calls):
            self._shutdown.request()
            return pb.DrainResponse()

    async def ResetPrefixCache(
        self, request: pb.ResetPrefixCacheRequest, context: Context
    ) -> pb.ResetPrefixCacheResponse:
        """Drops the prefix caches of all workers; returns the number of dropped KV blocks."""
        async with call_context("ResetPrefixCache", context, self._metrics, self._calls):
            return pb.ResetPrefixCacheResponse(num_blocks=await self.schedulers.reset_prefix_cache(request))

    async def PauseGeneration(self, request: pb.PauseGenerationRequest, context: Context) -> pb.PauseGenerationResponse:
        async with call_context("PauseGeneration", context, self._metrics, self._calls):
            return await self.schedulers.pause_generation(request)

    async def ResumeGeneration(
        self, request: pb.ResumeGenerationRequest, context: Context
    ) -> pb.ResumeGenerationResponse:
        """Resumes generation at all schedulers, after PauseGeneration."""
        async with call_context("ResumeGeneration", context, self._metrics, self._calls):
            return await self.schedulers.resume_generation(request)

    async def UpdateWeights(self, request: pb.UpdateWeightsRequest, context: Context) -> pb.UpdateWeightsResponse:
        async with call_context("UpdateWeights", context, self._metrics, self._calls):
            return await self.schedulers.update_weights(request)

    async def StreamWeights(
        self, requests: AsyncIterator[pb.StreamWeightsRequest], context: Context
    ) -> pb.StreamWeightsResponse:
        """Updates the weights of all workers to those sent in the stream. Raises InvalidArgument unless the first
        message is `begin` and each further one has a piece."""
        async with call_context("StreamWeights", context, self._metrics, self._calls):
            first = await anext(requests, None)
            if first is None or not first.HasField("begin"):
                raise InvalidArgument("begin: the first message must name the weights", field="begin")
            updated = await self.schedulers.update_weights(first.begin, _pieces(requests))
            return pb.StreamWeightsResponse(updated=updated)

    async def InitWeightsUpdateGroup(
        self, request: pb.InitWeightsUpdateGroupRequest, context: Context
    ) -> pb.InitWeightsUpdateGroupResponse:
        """Creates the process group through which a trainer will send weights to all workers."""
        async with call_context("InitWeightsUpdateGroup", context, self._metrics, self._calls):
            return await self.schedulers.init_weights_update_group(request)

    async def DestroyWeightsUpdateGroup(
        self, request: pb.DestroyWeightsUpdateGroupRequest, context: Context
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        """Destroys the trainer's process group at all schedulers."""
        async with call_context("DestroyWeightsUpdateGroup", context, self._metrics, self._calls):
            return await self.schedulers.destroy_weights_update_group(request)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.SleepResponse:
        async with call_context("Sleep", context, self._metrics, self._calls):
            return await self.schedulers.sleep(request)

    async def WakeUp(self, request: pb.WakeUpRequest, context: Context) -> pb.WakeUpResponse:
        async with call_context("WakeUp", context, self._metrics, self._calls):
            return await self.schedulers.wake_up(request)

    async def LoadAdapter(self, request: pb.LoadAdapterRequest, context: Context) -> pb.LoadAdapterResponse:
        async with call_context("LoadAdapter", context, self._metrics, self._calls):
            return await self.adapters.load(request)

    async def UnloadAdapter(self, request: pb.UnloadAdapterRequest, context: Context) -> pb.UnloadAdapterResponse:
        async with call_context("UnloadAdapter", context, self._metrics, self._calls):
            return await self.adapters.unload(request)

    async def ListAdapters(self, request: pb.ListAdaptersRequest, context: Context) -> pb.ListAdaptersResponse:
        async with call_context("ListAdapters", context, self._metrics, self._calls):
            return await self.schedulers.list_adapters(request)


async def _pieces(requests: AsyncIterator[pb.StreamWeightsRequest]) -> AsyncIterator[WeightsPiece]:
    """Yields the pieces of streamed weights. Raises InvalidArgument for a message without one."""
    async for request in requests:
        if not request.HasField("piece"):
            raise InvalidArgument("piece: every message after the first must have a piece", field="piece")
        yield request.piece


def _once_each(entries: Iterable[pb.ServiceStatus]) -> list[pb.ServiceStatus]:
    """Removes duplicates: schedulers also report the frontends they know; a service's own report comes first and
    wins."""
    known: dict[tuple[pb.Role, str], pb.ServiceStatus] = {}
    for entry in entries:
        known.setdefault((entry.role, entry.id), entry)
    return list(known.values())
