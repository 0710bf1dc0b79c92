"""The schedulers' own AdminServices, asked all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc
import grpc.aio

from shared.errors import FailedPrecondition, QuireError, Unavailable
from shared.pb.admin.v1 import admin_pb2 as pb
from shared.pb.admin.v1 import admin_pb2_grpc
from shared.rpc.channel import connect

TIMEOUT_S = 2.0


class SchedulerAdmins:
    """A channel to each scheduler, kept apart from the sessions so that asking cannot hold them up."""

    def __init__(self, addresses: Callable[[], Sequence[str]]) -> None:
        """`addresses`: of the schedulers there are now."""
        self._addresses = addresses
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def status(self) -> list[pb.ServiceStatus]:
        """What each reports of itself and its workers; a scheduler that does not answer is DOWN."""
        answers = await asyncio.gather(*(self._status_of(address) for address in await self._present()))
        return [entry for entries in answers for entry in entries]

    async def _status_of(self, address: str) -> list[pb.ServiceStatus]:
        try:
            reply = await self._stub(address).GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return [pb.ServiceStatus(role=pb.ROLE_SCHEDULER, id=address, address=address, state=pb.STATE_DOWN)]
        return list(reply.services)

    async def reset_prefix_cache(self, request: pb.ResetPrefixCacheRequest) -> int:
        """Blocks forgotten by all of them; raises the first refusal once all have answered."""
        calls = (self._reset_one(address, request) for address in await self._present())
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return sum(answer for answer in answers if isinstance(answer, int))

    async def _reset_one(self, address: str, request: pb.ResetPrefixCacheRequest) -> int:
        try:
            reply: pb.ResetPrefixCacheResponse = await self._stub(address).ResetPrefixCache(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise _refusal(address, error) from None
        return reply.num_blocks

    async def _present(self) -> Sequence[str]:
        """Channels to those that are gone are closed."""
        addresses = self._addresses()
        for address in set(self._channels).difference(addresses):
            await self._channels.pop(address).close()
        return addresses

    def _stub(self, address: str) -> admin_pb2_grpc.AdminServiceStub:
        if address not in self._channels:
            self._channels[address] = connect(address)
        return admin_pb2_grpc.AdminServiceStub(self._channels[address])

    async def close(self) -> None:
        for channel in self._channels.values():
            await channel.close()


def _refusal(address: str, error: grpc.aio.AioRpcError) -> QuireError:
    message = f"scheduler at {address}: {error.details()}"
    if error.code() is grpc.StatusCode.FAILED_PRECONDITION:
        return FailedPrecondition(message)
    return Unavailable(message)
