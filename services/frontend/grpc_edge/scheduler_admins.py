"""Operators' questions to the schedulers, asked of all at once."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

import grpc
import grpc.aio

from shared.errors import FailedPrecondition, QuireError, Unavailable
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from shared.rpc.parts import InParts
from shared.rpc.trust import Dialler

TIMEOUT_S = 2.0
SERVICE_NAME = scheduler_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name


class Schedulers(Protocol):
    """Who is dialled."""

    @property
    def addresses(self) -> list[str]: ...

    def knows(self, address: str) -> bool:
        """Whether the settings name it."""


class SchedulerAdmins:
    """A connection for each question, apart from the sessions, so that asking cannot hold them up."""

    def __init__(self, schedulers: Schedulers, dialler: Dialler) -> None:
        self._schedulers = schedulers
        self._dialler = dialler

    async def status(self) -> list[pb.ServiceStatus]:
        """What each reports of itself and its workers; a scheduler that does not answer is DOWN."""
        answers = await asyncio.gather(*(self._status_of(address) for address in self._schedulers.addresses))
        return [entry for entries in answers for entry in entries]

    async def _status_of(self, address: str) -> list[pb.ServiceStatus]:
        try:
            answer = await self._ask(address, scheduler_pb2.AdministerRequest(get_status=pb.GetStatusRequest()))
        except QuireError:
            return [pb.ServiceStatus(role=pb.ROLE_SCHEDULER, id=address, address=address, state=pb.STATE_DOWN)]
        return list(answer.status.services)

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> int:
        """Blocks forgotten by all of them; raises the first refusal once all have answered."""
        question = scheduler_pb2.AdministerRequest(reset_prefix_cache=request)
        calls = (self._ask(address, question) for address in self._schedulers.addresses)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(a.prefix_cache_reset.num_blocks for a in answers if isinstance(a, scheduler_pb2.AdministerResponse))

    async def _ask(self, address: str, question: scheduler_pb2.AdministerRequest) -> scheduler_pb2.AdministerResponse:
        try:
            async with asyncio.timeout(TIMEOUT_S), self._dialler.connect(address) as channel:
                call = scheduler_pb2_grpc.SchedulerServiceStub(channel).Administer()
                known = self._schedulers.knows(address)
                await self._dialler.meet(call, scheduler_pb2.AdministerRequest, SERVICE_NAME, address, known=known)
                await call.write(question)
                answer: Any = await InParts(call).read()
        except TimeoutError:
            raise Unavailable(f"scheduler at {address}: no answer within {TIMEOUT_S:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise _refusal(address, error) from None
        except asyncio.InvalidStateError:  # a write after the end
            raise Unavailable(f"scheduler at {address} closed the call") from None
        if answer is grpc.aio.EOF:
            raise Unavailable(f"scheduler at {address} gave no answer")
        return answer  # type: ignore[no-any-return]


def _refusal(address: str, error: grpc.aio.AioRpcError) -> QuireError:
    message = f"scheduler at {address}: {error.details()}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FailedPrecondition(message)
    return Unavailable(message)
