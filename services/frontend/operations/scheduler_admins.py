"""Operators' calls to all schedulers at once."""

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

STATUS_TIMEOUT_S = 2.0  # short: a scheduler that does not answer must not delay the others' status
ANSWER_TIMEOUT_S = 60.0  # covers running steps, workers reading files, and a busy machine
UPDATE_TIMEOUT_S = 3600.0  # running sequences may have to finish first
Result = TypeVar("Result")
PRESERVED_ERRORS: tuple[type[QuireError], ...] = (FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted)
SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class SchedulerAddresses(Protocol):
    """Provides the addresses of the schedulers to call, as the session client knows them."""

    @property
    def addresses(self) -> list[str]: ...

    @property
    def newest_update(self) -> int:
        """Highest known number of a weights update."""

    def is_configured(self, address: str) -> bool:
        """Whether the settings name the address."""


class SchedulerAdmins:
    """Makes operators' calls, each on a connection of its own, so that they cannot block the sessions."""

    def __init__(self, schedulers: SchedulerAddresses, dialler: Dialler) -> None:
        self._schedulers = schedulers
        self._dialler = dialler

    async def status(self) -> list[pb.ServiceStatus]:
        """Returns the status that each scheduler reports of itself and its workers; a scheduler that does not answer is
        DOWN."""
        answers = await asyncio.gather(*(self._status_of(address) for address in self._schedulers.addresses))
        return [entry for entries in answers for entry in entries]

    async def _status_of(self, address: str) -> list[pb.ServiceStatus]:
        """Returns the status of one scheduler and its workers; a scheduler that does not answer is DOWN."""
        try:
            admin_request = scheduler_pb2.AdministerRequest(get_status=pb.GetStatusRequest())
            answer = await self._ask(address, admin_request, STATUS_TIMEOUT_S)
        except QuireError:
            return [pb.ServiceStatus(role=pb.ROLE_SCHEDULER, id=address, address=address, state=pb.STATE_DOWN)]
        return list(answer.status.services)

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> int:
        """Resets the prefix caches; returns the number of dropped blocks. Raises the first refusal once all have
        answered."""
        admin_request = scheduler_pb2.AdministerRequest(reset_prefix_cache=request)
        answers = await self._ask_all(admin_request)
        return sum(answer.prefix_cache_reset.num_blocks for answer in answers)

    async def pause_generation(self, request: pb.PauseGenerationRequest) -> pb.PauseGenerationResponse:
        """Pauses all schedulers. Raises the first refusal once all have answered; the others are paused then."""
        admin_request = scheduler_pb2.AdministerRequest(pause_generation=request)
        paused = [answer.generation_paused for answer in await self._ask_all(admin_request)]
        return pb.PauseGenerationResponse(
            num_kept=sum(one.num_kept for one in paused), num_aborted=sum(one.num_aborted for one in paused)
        )

    async def resume_generation(self, request: pb.ResumeGenerationRequest) -> pb.ResumeGenerationResponse:
        """Resumes all schedulers. Raises the first refusal once all have answered."""
        await self._ask_all(scheduler_pb2.AdministerRequest(resume_generation=request))
        return pb.ResumeGenerationResponse()

    async def update_weights(
        self, request: pb.UpdateWeightsRequest, pieces: AsyncIterator[WeightsPiece] | None = None
    ) -> pb.UpdateWeightsResponse:
        """Updates the weights of all workers or of none: they are swapped only when all have staged them. `pieces`:
        weights sent as a stream, which are passed on without being stored. Raises InvalidArgument for a path together
        with pieces or neither, Unavailable without workers, and the first refusal."""
        if bool(request.path) == (pieces is not None):
            reason = "must be empty for streamed weights" if request.path else "must name the folder of the weights"
            raise InvalidArgument(f"path: {reason}", field="path")
        # A frontend whose clock is ahead may have numbered the last update.
        number = max(time.time_ns() // 1_000_000, self._schedulers.newest_update + 1)
        admin_request = scheduler_pb2.UpdateWeights(update=number, request=request)
        async with AsyncExitStack() as stack, asyncio.timeout(UPDATE_TIMEOUT_S):
            opened = [stack.enter_async_context(self._call(address)) for address in self._schedulers.addresses]
            calls = await _all(opened)
            await _all([call.send(scheduler_pb2.AdministerRequest(update_weights=admin_request)) for call in calls])
            staged = await _staged(calls, pieces)
            if not any(answer.weights_staged.num_workers for answer in staged):
                raise Unavailable("no worker is attached whose weights could be updated", retry_after_ms=1000)
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
        """Creates a process group with a trainer; ranks are assigned to the workers of one scheduler after the other.
        Raises InvalidArgument for too small a world size, and the first refusal once all have answered; the group is
        destroyed then."""
        statuses = await asyncio.gather(*(self._status_of(address) for address in self._schedulers.addresses))
        counts = [_num_ranks(services) for services in statuses]
        first, calls = request.rank_offset, []
        if first + sum(counts) > request.world_size:  # checked before any rank waits for the others
            text = (
                f"world_size: must be at least {first + sum(counts)}, for {sum(counts)} ranks of workers from "
                f"rank {first} on; got"
            )
            raise InvalidArgument(f"{text} {request.world_size}", field="world_size")
        for address, count in zip(self._schedulers.addresses, counts, strict=True):
            group = scheduler_pb2.InitWeightsUpdateGroup(request=request, first_rank=first, num_ranks=count)
            admin_request = scheduler_pb2.AdministerRequest(init_weights_update_group=group)
            if count or not any(counts):  # without any worker, the schedulers return the error
                calls.append(self._ask(address, admin_request, UPDATE_TIMEOUT_S))
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
        """Destroys the group at all schedulers. Raises the first refusal once all have answered."""
        admin_request = scheduler_pb2.AdministerRequest(destroy_weights_update_group=request)
        await self._ask_all(admin_request, UPDATE_TIMEOUT_S)
        return pb.DestroyWeightsUpdateGroupResponse()

    async def sleep(self, request: pb.SleepRequest) -> pb.SleepResponse:
        """Puts all workers to sleep. Raises the first refusal once all have answered; the others sleep then."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(sleep=request), UPDATE_TIMEOUT_S)
        slept = [answer.slept for answer in answers]
        return pb.SleepResponse(
            num_kept=sum(one.num_kept for one in slept), num_aborted=sum(one.num_aborted for one in slept)
        )

    async def wake_up(self, request: pb.WakeUpRequest) -> pb.WakeUpResponse:
        """Wakes all workers. Raises the first refusal once all have answered; the others are awake then."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(wake_up=request), UPDATE_TIMEOUT_S)
        return pb.WakeUpResponse(asleep=sorted({tag for answer in answers for tag in answer.woken_up.asleep}))

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        """Loads an adapter at all schedulers. Raises the first refusal once all have answered; a newly loaded adapter
        is unloaded again then."""
        admin_request = scheduler_pb2.AdministerRequest(load_adapter=request)
        answers = await self._answers(admin_request)
        refusal = next((answer for answer in answers if isinstance(answer, BaseException)), None)
        loaded = [answer.adapter_loaded for answer in answers if not isinstance(answer, BaseException)]
        if refusal is not None:
            if loaded:
                undo = scheduler_pb2.AdministerRequest(unload_adapter=pb.UnloadAdapterRequest(name=request.name))
                await self._answers(undo)  # answered with NotFound by schedulers that refused
            raise refusal
        return pb.LoadAdapterResponse(
            digest=loaded[0].digest if loaded else b"", num_workers=sum(one.num_workers for one in loaded)
        )

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        """Unloads an adapter at all schedulers. Raises the first refusal; NotFound only if no scheduler had the
        adapter."""
        answers = await self._answers(scheduler_pb2.AdministerRequest(unload_adapter=request))
        unloaded = [answer.adapter_unloaded for answer in answers if not isinstance(answer, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (unloaded and isinstance(answer, NotFound)):
                raise answer
        return pb.UnloadAdapterResponse(num_sequences=sum(one.num_sequences for one in unloaded))

    async def list_adapters(self, request: pb.ListAdaptersRequest) -> pb.ListAdaptersResponse:
        """Lists the adapters of all schedulers by name; the counts of those with the same name and content are
        added."""
        answers = await self._ask_all(scheduler_pb2.AdministerRequest(list_adapters=request))
        found: dict[tuple[str, bytes], pb.Adapter] = {}
        for adapter in (adapter for answer in answers for adapter in answer.adapters.adapters):
            known = found.setdefault((adapter.name, adapter.digest), adapter)
            if known is not adapter:
                known.num_workers += adapter.num_workers
                known.num_sequences += adapter.num_sequences
        return pb.ListAdaptersResponse(adapters=[found[key] for key in sorted(found)])

    async def _ask_all(
        self, admin_request: scheduler_pb2.AdministerRequest, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[scheduler_pb2.AdministerResponse]:
        """Calls all schedulers. Raises the first refusal once all have answered."""
        answers = await self._answers(admin_request, timeout_s)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if isinstance(answer, scheduler_pb2.AdministerResponse)]

    async def _answers(
        self, admin_request: scheduler_pb2.AdministerRequest, timeout_s: float = ANSWER_TIMEOUT_S
    ) -> list[scheduler_pb2.AdministerResponse | BaseException]:
        """Calls all schedulers concurrently; returns each answer or the error, in the order of the addresses."""
        calls = (self._ask(address, admin_request, timeout_s) for address in self._schedulers.addresses)
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _ask(
        self, address: str, admin_request: scheduler_pb2.AdministerRequest, timeout_s: float
    ) -> scheduler_pb2.AdministerResponse:
        """Calls one scheduler on a new connection. Raises QuireError; Unavailable after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s), self._call(address) as call:
                return await call.ask(admin_request)
        except TimeoutError:
            raise Unavailable(f"scheduler at {address}: no answer within {timeout_s:g} s") from None

    @asynccontextmanager
    async def _call(self, address: str) -> AsyncIterator[AdminCall]:
        """Opens an authenticated admin call on a connection of its own, and closes both at the end of the `with`."""
        async with self._dialler.connect(address) as channel:
            call = AdminCall(address, scheduler_pb2_grpc.SchedulerServiceStub(channel).Administer())
            await call.handshake(self._dialler, known=self._schedulers.is_configured(address))
            yield call


class AdminCall:
    """An admin call to one scheduler: requests, each with its answer."""

    def __init__(self, address: str, call: Any) -> None:
        self.address, self._call = address, call

    async def handshake(self, dialler: Dialler, *, known: bool) -> None:
        """Authenticates both sides. `known`: the settings name the address. Raises QuireError."""
        with _refusals(self.address):
            await dialler.handshake(
                self._call, scheduler_pb2.AdministerRequest, SERVICE_NAME, self.address, known=known
            )

    async def ask(self, admin_request: scheduler_pb2.AdministerRequest) -> scheduler_pb2.AdministerResponse:
        """Sends a request and returns its answer. Raises QuireError."""
        await self.send(admin_request)
        return await self.receive()

    async def send(self, message: scheduler_pb2.AdministerRequest) -> None:
        """Sends a request. Raises QuireError, with the scheduler's status if it has ended the call."""
        with _refusals(self.address):
            try:
                await self._call.write(message)
            except asyncio.InvalidStateError:
                await self._call.read()  # raises the status that the call has ended with
                raise

    async def receive(self) -> scheduler_pb2.AdministerResponse:
        """Returns the next answer. Raises QuireError, also for one that reports refused weights or if the call has
        ended."""
        with _refusals(self.address):
            answer: Any = await PartStream(self._call).read()
        if answer is grpc.aio.EOF:
            raise Unavailable(f"scheduler at {self.address} did not answer")
        if answer.HasField("weights_refused"):
            error = from_proto(answer.weights_refused)
            raise (type(error) if isinstance(error, PRESERVED_ERRORS) else Unavailable)(
                f"scheduler at {self.address}: {error.message}"
            )
        return answer  # type: ignore[no-any-return]


def _num_ranks(services: Sequence[pb.ServiceStatus]) -> int:
    """Returns the number of ranks of a scheduler's workers, without draining ones. Raises Unavailable if the scheduler
    is down."""
    down = [service for service in services if service.state == pb.STATE_DOWN and service.role == pb.ROLE_SCHEDULER]
    if down:
        raise Unavailable(f"scheduler at {down[0].address} does not answer", retry_after_ms=1000)
    workers = [service for service in services if service.role == pb.ROLE_WORKER]
    return sum(max(worker.num_ranks, 1) for worker in workers if worker.state != pb.STATE_DRAINING)


async def _staged(
    calls: Sequence[AdminCall], pieces: AsyncIterator[WeightsPiece] | None
) -> list[scheduler_pb2.AdministerResponse]:
    """Waits until all schedulers have staged the weights and returns their answers; forwards `pieces` meanwhile. Raises
    the first refusal, for streamed weights at once."""
    tasks = Tasks()
    answers = [tasks.start("answer about staged weights", call.receive()) for call in calls]
    try:
        if pieces is not None:
            await _forward(pieces, calls, answers)
        return await _all(answers)
    finally:
        await tasks.close()


async def _forward(
    pieces: AsyncIterator[WeightsPiece],
    calls: Sequence[AdminCall],
    answers: Sequence[asyncio.Task[scheduler_pb2.AdministerResponse]],
) -> None:
    """Forwards the pieces. Raises the answer of a scheduler that ends the call early, since a failed write does not
    tell why."""
    async for piece in pieces:
        part = scheduler_pb2.AdministerRequest(weights_piece=piece)
        results = await asyncio.gather(*(call.send(part) for call in calls), return_exceptions=True)
        if any(answer.done() for answer in answers) or any(isinstance(one, BaseException) for one in results):
            break
    else:
        return
    answered, _ = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
    for answer in answered:
        answer.result()


async def _all(waiting: Sequence[Awaitable[Result]]) -> list[Result]:
    """Awaits all and returns the results in order. Raises the first error once all have ended."""
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, BaseException):
            raise outcome
    return [outcome for outcome in outcomes if not isinstance(outcome, BaseException)]


@contextmanager
def _refusals(address: str) -> Iterator[None]:
    """Turns gRPC errors within the `with` into QuireErrors that name the scheduler."""
    try:
        yield
    except grpc.aio.AioRpcError as error:
        raise _refusal(address, error) from None
    except asyncio.InvalidStateError:  # a write after the end
        raise Unavailable(f"scheduler at {address} closed the call") from None


def _refusal(address: str, error: grpc.aio.AioRpcError) -> QuireError:
    """Returns the scheduler's error, naming the scheduler; kinds that a client can act on are preserved, others become
    Unavailable."""
    message = f"scheduler at {address}: {error.details()}"
    kinds = (kind for kind in PRESERVED_ERRORS if TRANSPORTS[kind.code].grpc_code is error.code())
    return next(kinds, Unavailable)(message)
