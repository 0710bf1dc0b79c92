"""One end of a long-lived bidirectional stream: ordered sends that never block, heartbeats, and a watch on silence.

Works on either side: gRPC's server context and its client call both have read() and write(). A peer that sends nothing
for a few heartbeat intervals is given up (silence.py), which notices what TCP does not: a process that hangs. One whose
message takes longer than that on its way is heard with each part of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from typing import Any, Generic, NoReturn, TypeVar

import grpc.aio

from quire.shared.errors import Unavailable
from quire.shared.process.supervision import is_cancel_requested
from quire.shared.rpc.call_status import CallStatus
from quire.shared.rpc.parts import CallStream, PartStream
from quire.shared.rpc.silence import TURNS_PER_INTERVAL, Silence

READER_HEARS_WITHIN_S = 5.0  # of the end of a call that a writer has run into
TURNS_UNTIL_TOLD = 2 * TURNS_PER_INTERVAL

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class Duplex(Generic[Incoming, Outgoing]):
    """`send` from any coroutine of the loop, iterate `messages()` in one, and run `pump()` in another."""

    def __init__(self, stream: CallStream, heartbeat: Outgoing, interval_s: float) -> None:
        self._stream = stream
        self._ending = CallStatus(stream.stream if isinstance(stream, PartStream) else stream)
        self._heartbeat = heartbeat
        self._silence = Silence(interval_s)
        self._outbox: deque[Outgoing] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._wrote = False  # since the last turn of the timer
        self._timer: asyncio.TimerHandle | None = None  # while pump() runs
        self._turns_of_parts = 0  # in which parts have come, and nothing was said
        if isinstance(stream, PartStream):
            stream.on_part = self._part_has_come

    def send(self, message: Outgoing) -> None:
        self._outbox.append(message)
        self._wake.set()

    def set_heartbeat_interval(self, interval_s: float) -> None:
        """The peer has named the interval; a wait that began with a longer one is cut short."""
        self._silence.interval_s = interval_s
        if self._timer is not None:
            self._set_timer()

    def close(self) -> None:
        """Lets pump() return once everything sent so far is written."""
        self._closing = True
        self._wake.set()

    @property
    def backlog(self) -> int:
        """Messages not yet taken by gRPC."""
        return len(self._outbox)

    @property
    def last_unsent(self) -> Outgoing | None:
        """The last message, if gRPC has not taken it yet: it may still be changed."""
        return self._outbox[-1] if self._outbox else None

    async def pump(self) -> None:
        """Writes what was sent, and a heartbeat when there was nothing for an interval. Returns after close()."""
        self._set_timer()
        try:
            while True:
                while self._outbox:
                    self._wrote = True
                    await self._write(self._outbox.popleft())
                if self._closing:
                    return
                self._wake.clear()
                await self._wake.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _set_timer(self) -> None:
        """One for the whole stream: one for each wait would cost as much as what is waited for."""
        if self._timer is not None:
            self._timer.cancel()
        turn_s = self._silence.interval_s / TURNS_PER_INTERVAL
        self._timer = asyncio.get_running_loop().call_later(turn_s, self._turn)

    def _turn(self) -> None:
        """Half an interval is over: with nothing written in it, a heartbeat is due before the other half is."""
        if not self._wrote and not self._outbox:
            self.send(self._heartbeat)
        self._wrote = False
        self._set_timer()

    async def _part_has_come(self) -> None:
        """The peer lives. One that writes its first message waits for an answer: it has to hear that we live, too, and
        before pump() nobody else says so."""
        self._turns_of_parts += self._silence.heard()
        if self._timer is None and not self._closing and self._turns_of_parts >= TURNS_UNTIL_TOLD:
            self._turns_of_parts = 0
            await self._write(self._heartbeat)

    async def messages(self) -> AsyncIterator[Incoming]:
        """Until the peer closes its side; raises Unavailable when it falls silent."""
        while True:
            message = await self._receive()
            if message is grpc.aio.EOF:
                return
            yield message

    async def receive(self) -> Incoming:
        """The next message; Unavailable if there is none to come."""
        message = await self._receive()
        if message is grpc.aio.EOF:
            raise Unavailable("the peer closed the session")
        return message  # type: ignore[no-any-return]

    async def _write(self, message: Outgoing) -> None:
        try:
            await self._stream.write(message)
        except asyncio.CancelledError:
            _raise_unless_asked()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call is over. Why, is what its reader is told, and a writer only sometimes.
            await asyncio.sleep(READER_HEARS_WITHIN_S)
            raise Unavailable("the peer has ended the stream") from None

    async def _receive(self) -> Any:
        try:
            async with self._silence:
                return await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise self._ending.resolve(error) from None
        except asyncio.CancelledError:
            _raise_unless_asked()


def _raise_unless_asked() -> NoReturn:
    """In an `except CancelledError`: gRPC's word for a call that was cancelled on this side is an error like others."""
    if is_cancel_requested():
        raise  # noqa: PLE0704
    raise Unavailable("the stream was cancelled on this side") from None
