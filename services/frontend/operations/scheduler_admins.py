"""Operators' questions to the schedulers, asked of all at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio

from quire.shared.errors import (
    TRANSPORTS,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
    from_proto,
)
from quire.shared.pb.admin.v1 import admin_pb2 as pb
from quire.shared.pb.common.v1.weights_stream_pb2 import WeightsPiece
from quire.shared.pb.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire.shared.process.supervision import Tasks
from quire.shared.rpc.parts import PartStream
from quire.shared.rpc.trust import Dialler

STATUS_TIMEOUT_S = 2.0  # whoever looks wants to see the others, too
ANSWER_TIMEOUT_S = 60.0  # steps end meanwhile, workers read files, and a busy machine may stand still for a moment
UPDATE_TIMEOUT_S = 3600.0  # and what runs may go on to its end before
Result = TypeVar("Result")
PRESERVED_ERRORS: tuple[type[QuireError], ...] = (FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted)
SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerAddresses(Protocol):
    """Who is dialled."""

    @property
    def addresses(self) -> list[str]: ...

    @property
    def newest_update(self) -> int:
        """Of weights, by number."""

    def is_configured(self, address: str) -> bool:
        """Whether the settings name it."""


class SchedulerAdmins:
    """A connection for each question, apart from the sessions, so that asking cannot hold them up."""

    def __init__(self, schedulers: SchedulerAddresses, dialler: Dialler) -> None:
        self._schedulers = schedulers
        self._dialler = dialler

    async def status(self) -> list[pb.ServiceStatus]:
        """What each reports of itself and its workers; a scheduler that does not answer is DOWN."""
        answers = await asyncio.gather(*(self._status_of(address) for address in self._schedulers.addresses))
        return [entry for entries in answers for entry in entries]

    async def _status_of(self, address: str) -> list[pb.ServiceStatus]:
        try:
            question = scheduler_pb2.AdministerRequest(get_status=pb.GetStatusRequest())
            answer = await self._ask(address, question, STATUS_TIMEOUT_S)
        except QuireError:
            return [pb.ServiceStatus(role=pb.ROLE_SCHEDULER, id=address, address=address, state=pb.STATE_DOWN)]
        return list(answer.status.services)

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> int:
        """Blocks forgotten by all of them; raises the first refusal once all have answered."""
        question = scheduler_pb2.AdministerRequest(reset_prefix_cache=request)
        answers = await self._ask_all(question)
        return sum(answer.prefix_cache_reset.num_blocks for answer in answers)

    async def pause_generation(self, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        """Of all of them; raises the first refusal once all have answered: the others are paused then."""
        question = scheduler_pb2.AdministerRequest(pause_generation=request)
        paused = [answer.generation_paused for answer in await self._ask_all(question)]
        return pb.PauseGenerationResponse(
            num_kept=sum(one.num_kept for one in paused), num_aborted=sum(one.num_aborted for one in paused)
        )

    async def resume_generation(self, request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        """Of all of them; raises the first refusal once all have answered."""
        await self._ask_all(scheduler_pb2.AdministerRequest(resume_generation=request))
        return pb.ResumeGenerationResponse()

    async def update_weights(
        self, request: pb.UpdateWeightsRequest, pieces: AsyncIterator[WeightsPiece] | None = None
    ) -> pb.UpdateWeightsResponse:
        """Of all of them or of none, as far as they live: only when all have staged the new weights does any swap.
        `pieces`: of weights that come as a stream; nothing of them is kept here."""
        if bool(request.path) == (pieces is not None):
            wrong = "weights that come as a stream have none" if request.path else "the folder's is not said"
            raise InvalidArgument(f"path: {wrong}", field="path")
        number = max(time.time_ns() // 1_000_000, self._schedulers.newest_update + 1)  # whose clock was ahead of ours
        question = scheduler_pb2.UpdateWeights(update=number, request=request)
        async with AsyncExitStack() as stack, asyncio.timeout(UPDATE_TIMEOUT_S):
            opened = [stack.enter_async_context(self._call(address)) for address in self._schedulers.addresses]
            calls = await _all(opened)
            await _all([call.send(scheduler_pb2.AdministerRequest(update_weights=question)) for call in calls])
            staged = await _staged(calls, pieces)
            if not any(answer.weights_staged.num_workers for answer in staged):
                raise Unavailable("no worker is there whose weights could be updated", retry_after_ms=1000)
            swap = scheduler_pb2.AdministerRequest(swap_weights=scheduler_pb2.SwapStagedWeights())
            answers = await _all([call.ask(swap) for call in calls])
        updated = [answer.weights_updated for answer in answers]
        return pb.UpdateWeightsResponse(
            weight_version=updated[0].weight_version if updated else "",
            num_workers=sum(one.num_workers for one in updated),
            num_kept=sum(one.num_kept for one in updated),
            num_aborted=sum(one.num_aborted for one in updated),
        )

    async def init_weights_update_group(
        self, request: pb.InitWeightsUpdateGroupRequest
    ) -> pb.InitWeightsUpdateGroupResponse:
        """Ranks go to the workers of one scheduler after the other. Raises the first refusal once all have answered:
        then none stays in it."""
        statuses = await asyncio.gather(*(self._status_of(address) for address in self._schedulers.addresses))
        counts = [_num_ranks(services) for services in statuses]
        first, calls = request.rank_offset, []
        if first + sum(counts) > request.world_size:  # before anybody waits for the others
            text = f"world_size: {request.world_size}, but the {sum(counts)} ranks of all workers from {first} on"
            raise InvalidArgument(f"{text} make {first + sum(counts)}", field="world_size")
        for address, count in zip(self._schedulers.addresses, counts, strict=True):
            asked = scheduler_pb2.InitWeightsUpdateGroup(request=request, first_rank=first, num_ranks=count)
            question = scheduler_pb2.AdministerRequest(init_weights_update_group=asked)
            if count or not any(counts):  # where there is no worker at all the schedulers say so
                calls.append(self._ask(address, question, UPDATE_TIMEOUT_S))
            first += count
        try:
            await _all(calls)
        except QuireError:
            undo = pb.DestroyWeightsUpdateGroupRequest(group_name=request.group_name)
            await self._answers(scheduler_pb2.AdministerRequest(destroy_weights_update_group=undo))
            raise
        return pb.InitWeightsUpdateGroupResponse(num_ranks=sum(counts))

    async def destroy_weights_update_group(
        self, request: pb.DestroyWeightsUpdateGroupRequest
    ) -> pb.DestroyWeightsUpdateGroupResponse:
        """Of all of them; raises the first refusal once all have answered."""
        question = scheduler_pb2.AdministerRequest(destroy_weights_update_group=request)
        await self._ask_all(question, UPDATE_TIMEOUT_S)
        return pb.DestroyWeightsUpdateGroupResponse()

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """All of them; raises the first refusal once all have answered: the others sleep then."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(sleep=request), UPDATE_TIMEOUT_S)
        slept = [answer.slept for answer in answers]
        return pb.SleepResponse(
            num_kept=sum(one.num_kept for one in slept), num_aborted=sum(one.num_aborted for one in slept)
        )

    async def wake_up(self, request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        """All of them; raises the first refusal once all have answered: the others are awake then."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(wake_up=request), UPDATE_TIMEOUT_S)
        return pb.WakeUpResponse(asleep=sorted({tag for answer in answers for tag in answer.woken_up.asleep}))

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Of all of them; raises the first refusal once all have answered: then none offers what is new."""
        question = scheduler_pb2.AdministerRequest(load_adapter=request)
        answers = await self._answers(question)
        refusal = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        loaded = [answer.adapter_loaded for answer in answers if not isinstance(answer, BaseException)]
        if refusal is not None:
            if loaded:
                undo = scheduler_pb2.AdministerRequest(unload_adapter=pb.UnloadAdapterRequest(name=request.name))
                await self._answers(undo)  # NotFound where it has refused
            raise refusal
        return pb.LoadAdapterResponse(
            digest=loaded[0].digest if loaded else b"", num_workers=sum(one.num_workers for one in loaded)
        )

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """From all of them; raises the first refusal if no scheduler had it."""
        answers = await self._answers(scheduler_pb2.AdministerRequest(unload_adapter=request))
        unloaded = [answer.adapter_unloaded for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (unloaded and isinstance(answer, NotFound)):
                raise answer
        return pb.UnloadAdapterResponse(num_sequences=sum(one.num_sequences for one in unloaded))

    async def list_adapters(self, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        """Those of one name and content are one."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(list_adapters=request))
        found: dict[tuple[str, bytes], pb.Adapter] = {}
        for adapter in (adapter for answer in answers for adapter in answer.adapters.adapters):
            known = found.setdefault((adapter.name, adapter.digest), adapter)
            if known is not adapter:
                known.num_workers += adapter.num_workers
                known.num_sequences += adapter.num_sequences
        return pb.ListAdaptersResponse(adapters=[found[key] for key in sorted(found)])

    async def _ask_all(
        self, question: scheduler_pb2.AdministerRequest, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[scheduler_pb2.AdministerResponse]:
        """Raises the first refusal once all have answered."""
        answers = await self._answers(question, timeout_s)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, scheduler_pb2.AdministerResponse)]

    async def _answers(
        self, question: scheduler_pb2.AdministerRequest, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[scheduler_pb2.AdministerResponse | BaseException]:
        calls = (self._ask(address, question, timeout_s) for address in self._schedulers.addresses)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(
        self, address: str, question: scheduler_pb2.AdministerRequest, timeout_s: float
    ) -> scheduler_pb2.AdministerResponse:
        try:
            async with asyncio.timeout(timeout_s), self._call(address) as call:
                return await call.ask(question)
        except TimeoutError:
            raise Unavailable(f"scheduler at {address}: no answer within {timeout_s:g} s") from None

    @asynccontextmanager
    async def _call(self, address: str) -> AsyncIterator[AdminCall]:
        """Proved on both sides."""
        async with self._dialler.connect(address) as channel:
            call = AdminCall(address, scheduler_pb2_grpc.SchedulerServiceStub(channel).Administer())
            await call.handshake(self._dialler, known=self._schedulers.is_configured(address))
            yield call


class AdminCall:
    """Questions to one scheduler, each with its answer."""

    def __init__(self, address: str, call: Any) -> None:
        self.address, self._call = address, call

    async def handshake(self, dialler: Dialler, *, known: bool) -> None:
        with _refusals(self.address):
            await dialler.handshake(
                self._call, scheduler_pb2.AdministerRequest, SERVICE_NAME, self.address, known=known
            )

    async def ask(self, question: scheduler_pb2.AdministerRequest) -> scheduler_pb2.AdministerResponse:
        """Raises QuireError."""
        await self.send(question)
        return await self.receive()

    async def send(self, message: scheduler_pb2.AdministerRequest) -> None:
        """Raises QuireError, with the scheduler's own words if it has ended the call."""
        with _refusals(self.address):
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError:
                await self._call.read()  # raises what the call has ended with
                raise

    async def receive(self) -> scheduler_pb2.AdministerResponse:
        """Raises QuireError."""
        with _refusals(self.address):
            answer: Any = await PartStream(self._call).read()
        if answer is grpc.aio.EOF:
            raise Unavailable(f"scheduler at {self.address} gave no answer")
        if answer.HasField("weights_refused"):
            error = from_proto(answer.weights_refused)
            raise (type(error) if isinstance(error, PRESERVED_ERRORS) else Unavailable)(
                f"scheduler at {self.address}: {error.message}"
            )
        return answer  # type: ignore[no-any-return]


def _num_ranks(services: Sequence[pb.ServiceStatus]) -> int:
    """Of the workers of a scheduler that stay. Raises Unavailable if it is not there."""
    down = [service for service in services if service.state == pb.STATE_DOWN and service.role == pb.ROLE_SCHEDULER]
    if down:
        raise Unavailable(f"scheduler at {down[0].address} does not answer", retry_after_ms=1000)
    workers = [service for service in services if service.role == pb.ROLE_WORKER]
    return sum(max(worker.num_ranks, 1) for worker in workers if worker.state != pb.STATE_DRAINING)


async def _staged(
    calls: Sequence[AdminCall], pieces: AsyncIterator[WeightsPiece] | None
) -> list[scheduler_pb2.AdministerResponse]:
    """Raises the first refusal: of weights that come in pieces as soon as it is heard."""
    tasks = Tasks()
    answers = [tasks.start("what a scheduler says of new weights", call.receive()) for call in calls]
    try:
        if pieces is not None:
            await _pass_on(pieces, calls, answers)
        return await _all(answers)
    finally:
        await tasks.close()


async def _pass_on(
    pieces: AsyncIterator[WeightsPiece],
    calls: Sequence[AdminCall],
    answers: Sequence[asyncio.Task[scheduler_pb2.AdministerResponse]],
) -> None:
    """Raises what a scheduler answers before it has them all: a write to a call that is over does not say why."""
    async for piece in pieces:
        part = scheduler_pb2.AdministerRequest(weights_piece=piece)
        told = await asyncio.gather(*(call.send(part) for call in calls), return_exceptions=True)
        if any(answer.done() for answer in answers) or any(isinstance(one, BaseException) for one in told):
            break
    else:
        return
    heard, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
    for answer in heard:
        answer.result()


async def _all(waiting: Sequence[Awaitable[Result]]) -> list[Result]:
    """Raises the first refusal once all have ended."""
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _refusal(address, error) from None
    except asyncio.InvalidStateError:  # a write after the end
        raise Unavailable(f"scheduler at {address} closed the call") from None


def _refusal(address: str, error: grpc.aio.AioRpcError) -> QuireError:
    message = f"scheduler at {address}: {error.details()}"
    kinds = (kind for kind in PRESERVED_ERRORS if TRANSPORTS[kind.code].grpc_code is error.code())
    return next(kinds, Unavailable)(message)
