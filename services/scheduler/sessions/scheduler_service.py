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
        try:
            caller = await self._door.authenticate(context, pb.SessionResponse, SERVICE_NAME)
            await self._frontends.serve(context, caller)
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)
        except ColumnError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except Exception:
            log.exception("the session of a frontend failed")
            await context.abort(grpc.StatusCode.INTERNAL, "internal error: this session is over")

    async def Administer(
        self, _requests: object, context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse]
    ) -> None:
        try:
            await self._door.authenticate(context, pb.AdministerResponse, SERVICE_NAME)
            question = await context.read()
            if not isinstance(question, pb.AdministerRequest):
                return  # the caller left
            if question.HasField("update_weights"):
                await self._update_weights(context, question.update_weights)
                return
            await PartStream(context).write(await self._answer(question))
        except QuireError as error:
            await context.abort(transport(error).grpc_code, error.message)

    async def _update_weights(
        self, context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse], asked: pb.UpdateWeights
    ) -> None:
        """Stages the weights; swaps them in if the caller says so, drops them if it leaves."""
        if asked.request.path:
            await self._staged(context, asked, None)
            return
        try:
            await self._staged(context, asked, _pieces(context))
        except QuireError as error:
            await context.write(pb.AdministerResponse(weights_refused=to_proto(error)))
            raise

    async def _staged(
        self,
        context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse],
        asked: pb.UpdateWeights,
        pieces: AsyncIterator[WeightsPiece] | None,
    ) -> None:
        async with self._administration.updates.staged(asked.update, asked.request, pieces) as update:
            await context.write(pb.AdministerResponse(weights_staged=pb.WeightsStaged(num_workers=update.num_workers)))
            decision = await context.read()
            if isinstance(decision, pb.AdministerRequest) and decision.HasField("swap_weights"):
                await context.write(pb.AdministerResponse(weights_updated=await update.swap()))

    async def _answer(self, question: pb.AdministerRequest) -> pb.AdministerResponse:
        answer, asked = pb.AdministerResponse(), self._administration
        match question.WhichOneof("message"):
            case "get_status":
                answer.status.CopyFrom(asked.status())
            case "reset_prefix_cache":
                answer.prefix_cache_reset.CopyFrom(await asked.reset_prefix_cache(question.reset_prefix_cache))
            case "pause_generation":
                answer.generation_paused.CopyFrom(await asked.pause_generation(question.pause_generation))
            case "resume_generation":
                answer.generation_resumed.CopyFrom(await asked.resume_generation(question.resume_generation))
            case "init_weights_update_group":
                init = question.init_weights_update_group
                joined = await asked.groups.init(init.request, init.first_rank, init.num_ranks)
                answer.weights_update_group.CopyFrom(joined)
            case "destroy_weights_update_group":
                left = await asked.groups.destroy(question.destroy_weights_update_group)
                answer.weights_update_group_destroyed.CopyFrom(left)
            case "sleep":
                answer.slept.CopyFrom(await asked.sleep(question.sleep))
            case "wake_up":
                answer.woken_up.CopyFrom(await asked.wake_up(question.wake_up))
            case "load_adapter":
                answer.adapter_loaded.CopyFrom(await asked.load_adapter(question.load_adapter))
            case "unload_adapter":
                answer.adapter_unloaded.CopyFrom(await asked.unload_adapter(question.unload_adapter))
            case "list_adapters":
                answer.adapters.CopyFrom(await asked.list_adapters())
            case kind:
                raise self._door.unexpected_handshake(kind) or FailedPrecondition(
                    f"{kind} is not an administration call"
                )
        return answer


async def _pieces(
    context: grpc.aio.ServicerContext[pb.AdministerRequest, pb.AdministerResponse],
) -> AsyncIterator[WeightsPiece]:
    """Yields the pieces of weights up to the end piece, or to the end of the call."""
    while isinstance(message := await context.read(), pb.AdministerRequest) and message.HasField("weights_piece"):
        yield message.weights_piece
        if message.weights_piece.HasField("end"):
            return
