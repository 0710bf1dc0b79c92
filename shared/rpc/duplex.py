"""One end of a long-lived bidirectional stream: ordered sends that never block, heartbeats, and detection of silent
peers.

Works on either side: gRPC's server context and its client call both have read() and write(). A peer that sends
nothing for several heartbeat intervals is considered lost (silence.py), which detects what TCP does not: a hung
process. Every part of a large message counts as a sign of life.
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

STATUS_DELAY_S = 5.0  # time for the reader to receive the status of a call whose writer failed
TURNS_UNTIL_HEARTBEAT = 2 * TURNS_PER_INTERVAL

Incoming = TypeVar("Incoming")
Outgoing = TypeVar("Outgoing")


class Duplex(Generic[Incoming, Outgoing]):
    """Stream end: call `send` from any coroutine of the loop, iterate `messages()` in one, and run `pump()` in
    another."""

    def __init__(self, stream: CallStream, heartbeat: Outgoing, interval_s: float) -> None:
        """Wraps one end of a gRPC stream. `heartbeat`: message to send after an interval without any; `interval_s`:
        heartbeat interval, until the peer announces another."""
        self._stream = stream
        self._ending = CallStatus(stream.stream if isinstance(stream, PartStream) else stream)
        self._heartbeat = heartbeat
        self._silence = Silence(interval_s)
        self._outbox: deque[Outgoing] = deque()
        self._wake = asyncio.Event()
        self._closing = False
        self._wrote = False  # whether something was written since the last timer turn
        self._timer: asyncio.TimerHandle | None = None  # while pump() runs
        self._part_turns = 0  # turns in which parts arrived and nothing was sent
        if isinstance(stream, PartStream):
            stream.on_part = self._on_part

    def send(self, message: Outgoing) -> None:
        self._outbox.append(message)
        self._wake.set()

    def set_heartbeat_interval(self, interval_s: float) -> None:
        """Applies the interval that the peer has announced; also shortens a wait in progress."""
        self._silence.interval_s = interval_s
        if self._timer is not None:
            self._set_timer()

    def close(self) -> None:
        """Makes pump() return once everything sent so far is written."""
        self._closing = True
        self._wake.set()

    @property
    def backlog(self) -> int:
        """Number of messages that gRPC has not accepted yet."""
        return len(self._outbox)

    @property
    def last_unsent(self) -> Outgoing | None:
        """The last message if gRPC has not accepted it yet: it may still be modified."""
        return self._outbox[-1] if self._outbox else None

    async def pump(self) -> None:
        """Writes the messages sent, and a heartbeat after an interval without any. Returns after close()."""
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
        """Restarts the stream's only timer; one timer per wait would cost as much as the message."""
        if self._timer is not None:
            self._timer.cancel()
        turn_s = self._silence.interval_s / TURNS_PER_INTERVAL
        self._timer = asyncio.get_running_loop().call_later(turn_s, self._turn)

    def _turn(self) -> None:
        """Handles half an interval: if nothing was written in it, a heartbeat is due within the other half."""
        if not self._wrote and not self._outbox:
            self.send(self._heartbeat)
        self._wrote = False
        self._set_timer()

    async def _on_part(self) -> None:
        """Handles a part of a message: the peer is alive. While it writes its first message it waits for an answer,
        and before pump() runs nothing else sends heartbeats."""
        self._part_turns += self._silence.heard()
        if self._timer is None and not self._closing and self._part_turns >= TURNS_UNTIL_HEARTBEAT:
            self._part_turns = 0
            await self._write(self._heartbeat)

    async def messages(self) -> AsyncIterator[Incoming]:
        """Yields messages until the peer closes its side. Raises Unavailable if it becomes silent."""
        while True:
            message = await self._receive()
            if message is grpc.aio.EOF:
                return
            yield message

    async def receive(self) -> Incoming:
        """Returns the next message. Raises Unavailable if the peer has closed its side."""
        message = await self._receive()
        if message is grpc.aio.EOF:
            raise Unavailable("the peer closed the session")
        return message  # type: ignore[no-any-return]

    async def _write(self, message: Outgoing) -> None:
        """Writes one message. Raises Unavailable if the call was cancelled locally, or, after a moment in which the
        reader can report the call's status, if the call is over."""
        try:
            await self._stream.write(message)
        except asyncio.CancelledError:
            _raise_unless_requested()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            # The call is over. The reader always receives its status, the writer only sometimes.
            await asyncio.sleep(STATUS_DELAY_S)
            raise Unavailable("the peer has ended the stream") from None

    async def _receive(self) -> Any:
        """Returns the next message, or EOF. Raises Unavailable if the peer is silent for too long or the call was
        cancelled locally, and AioRpcError with the server's own status if the call has ended."""
        try:
            async with self._silence:
                return await self._stream.read()
        except grpc.aio.AioRpcError as error:
            raise self._ending.resolve(error) from None
        except asyncio.CancelledError:
            _raise_unless_requested()


def _raise_unless_requested() -> NoReturn:
    """Handles a CancelledError: re-raises a requested cancellation; otherwise raises Unavailable, because gRPC
    reports a locally cancelled call by a CancelledError."""
    if is_cancel_requested():
        raise  # noqa: PLE0704
    raise Unavailable("the stream was cancelled locally") from None
