"""quire.scheduler.v1: calls that frontends may open; every call is authenticated first."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc
import grpc.aio

from quire.services.scheduler.operations.administration import SchedulerAdministration
from quire.services.scheduler.sessions.frontend_service import FrontendService
from quire.shared.columns import ColumnError
from quire.shared.errors import FailedPrecondition, QuireError, to_proto, transport
from quire.shared.logs import logger
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.pb.scheduler.v1 import scheduler_pb2 as pb
from quire.shared.pb.scheduler.v1 import scheduler_pb2_grpc
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.trust import HandshakeAcceptor

log = logger("frontends")

SERVICE_NAME = pb.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerService(scheduler_pb2_grpc.SchedulerServiceServicer):
    """Frontend sessions, and operator calls that frontends forward."""

    def __init__(
        self, frontends: FrontendService, administration: SchedulerAdministration, door: HandshakeAcceptor
    ) -> None:
        self._frontends = frontends
        self._administration = administration
        self._door = door

    async def Session(
        self, _requests: object, context: grpc.aio.ServicerContext[pb.SessionRequest, pb.SessionResponse]
    ) -> None:
        """Serves the gRPC stream of one frontend after authentication. Errors abort the call with their status code;
        unexpected ones are logged and reported as INTERNAL."""
        try:
            caller = await self._door.authenticate(context, pb.SessionResponse, SERVICE_NAME)
            await self._frontends.serve(context, caller)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)
        except ColumnError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            log.exception("frontend session failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: this session has ended")

    async def Administer(
        self, _requests: object, context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse]
    ) -> None:
        """Serves one operator call that a frontend forwards, after authentication; a weight update is a dialogue,
        all others are one answer. Errors abort the call with their status code."""
        try:
            await self._door.authenticate(context, pb.AdministerResponse, SERVICE_NAME)
            request = await context.read()
            if not isinstance(request, pb.AdministerRequest):
                return  # the caller left
            if request.HasField("update_weights"):
                await self._update_weights(context, request.update_weights)
                return
            await PartStream(context).write(await self._answer(request))
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    async def _update_weights(
        self, context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse], update: pb.UpdateWeights
    ) -> None:
        """Stages the weights from a path or from the pieces that follow; swaps them in if the caller says so, drops
        them if it leaves. An error with streamed weights is also sent as a message before it is raised."""
        if update.request.path:
            await self._staged(context, update, None)
            return
        try:
            await self._staged(context, update, _pieces(context))
        except QuireError as error:
            await context.write(pb.AdministerResponse(weights_refused=to_proto(error)))
            raise

    async def _staged(
        self,
        context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse],
        request: pb.UpdateWeights,
        pieces: AsyncIterator[WeightsPiece] | None,
    ) -> None:
        """Stages the weights on all workers and reports it, then waits for the caller's decision: swaps them in and
        answers, or drops them. `pieces`: weights that come as a stream."""
        async with self._administration.updates.staged(request.update, request.request, pieces) as staged:
            await context.write(pb.AdministerResponse(weights_staged=pb.WeightsStaged(num_workers=staged.num_workers)))
            decision = await context.read()
            if isinstance(decision, pb.AdministerRequest) and decision.HasField("swap_weights"):
                await context.write(pb.AdministerResponse(weights_updated=await staged.swap()))

    async def _answer(self, request: pb.AdministerRequest) -> pb.AdministerResponse:
        """Executes an operator call and returns its answer. Raises FailedPrecondition for an unknown call, and the
        call's own QuireError."""
        answer, administration = pb.AdministerResponse(), self._administration
        match request.WhichOneof("message"):
            case "get_status":
                answer.status.CopyFrom(administration.status())
            case "reset_prefix_cache":
                answer.prefix_cache_reset.CopyFrom(await administration.reset_prefix_cache(request.reset_prefix_cache))
            case "pause_generation":
                answer.generation_paused.CopyFrom(await administration.pause_generation(request.pause_generation))
            case "resume_generation":
                answer.generation_resumed.CopyFrom(await administration.resume_generation(request.resume_generation))
            case "init_weights_update_group":
                init = request.init_weights_update_group
                joined = await administration.groups.init(init.request, init.first_rank, init.num_ranks)
                answer.weights_update_group.CopyFrom(joined)
            case "destroy_weights_update_group":
                destroyed = await administration.groups.destroy(request.destroy_weights_update_group)
                answer.weights_update_group_destroyed.CopyFrom(destroyed)
            case "sleep":
                answer.slept.CopyFrom(await administration.sleep(request.sleep))
            case "wake_up":
                answer.woken_up.CopyFrom(await administration.wake_up(request.wake_up))
            case "load_adapter":
                answer.adapter_loaded.CopyFrom(await administration.load_adapter(request.load_adapter))
            case "unload_adapter":
                answer.adapter_unloaded.CopyFrom(await administration.unload_adapter(request.unload_adapter))
            case "list_adapters":
                answer.adapters.CopyFrom(await administration.list_adapters())
            case kind:
                text = f"{kind} is not an administration call"
                raise self._door.unexpected_handshake(kind) or FailedPrecondition(text)
        return answer


async def _pieces(
    context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse],
) -> AsyncIterator[WeightsPiece]:
    """Yields the pieces of weights up to the end piece, or to the end of the call."""
    while isinstance(message := await context.read(), pb.AdministerRequest) and message.HasField("weights_piece"):
        yield message.weights_piece
        if message.weights_piece.HasField("end"):
            return
