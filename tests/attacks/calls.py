"""One call of an attacker, sent as raw bytes, so that no library corrects it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import grpc
import grpc.aio

LONGEST_S = 60.0
ATTACKER, BYSTANDER = "sk-attacker-0123456789", "sk-bystander-0123456789"  # API keys of two tenants
SHOWN = f"authorization: Bearer {ATTACKER}\r\n"
UNBOUNDED = [("grpc.max_send_message_length", -1)]


@dataclass(frozen=True, slots=True)
class Target:
    """Addresses of a frontend."""

    http: str
    grpc: str


@dataclass(frozen=True, slots=True)
class Post:
    """An HTTP call."""

    path: str
    body: bytes
    chunked: bool = False
    leaves_after_s: float | None = None
    content_type: str = "application/json"
    json_bytes: int | None = None  # length of the JSON part, if tensors follow
    encoding: str = ""  # of the body

    @property
    def num_bytes(self) -> int:
        return len(self.body)

    async def send(self, target: Target) -> str:
        """Sends the call and returns its status."""
        host, _, port = target.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            async with asyncio.timeout(LONGEST_S):
                sending = asyncio.create_task(self._write(writer))
                try:
                    if self.leaves_after_s is not None:
                        await sending
                        await asyncio.sleep(self.leaves_after_s)
                        return "left"
                    return (await reader.readline()).split()[1].decode()
                finally:
                    sending.cancel()
                    await asyncio.gather(sending, return_exceptions=True)
        except TimeoutError:
            return "no answer"
        except (ConnectionError, IndexError):
            return "closed"
        finally:
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        length = b"transfer-encoding: chunked" if self.chunked else b"content-length: %d" % len(self.body)
        head = f"POST {self.path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        head += f"content-type: {self.content_type}\r\n"
        if self.json_bytes is not None:
            head += f"inference-header-content-length: {self.json_bytes}\r\n"
        if self.encoding:
            head += f"content-encoding: {self.encoding}\r\n"
        writer.write((head + SHOWN).encode() + length + b"\r\n\r\n")
        for start in range(0, len(self.body), 1 << 16):
            piece = self.body[start : start + (1 << 16)]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece) if self.chunked else piece)
            await writer.drain()
        if self.chunked:
            writer.write(b"0\r\n\r\n")


@dataclass(frozen=True, slots=True)
class Rpc:
    """A gRPC call."""

    method: str
    message: bytes
    streams: bool = True
    service: str = "quire.inference.v1.InferenceService"

    @property
    def num_bytes(self) -> int:
        return len(self.message)

    async def send(self, target: Target) -> str:
        """Sends the call and returns its status."""
        path = f"/{self.service}/{self.method}"
        shown = (("authorization", f"Bearer {ATTACKER}"),)
        async with grpc.aio.insecure_channel(target.grpc, options=UNBOUNDED) as channel:
            try:
                if self.streams:
                    async for _ in channel.unary_stream(path)(self.message, timeout=LONGEST_S, metadata=shown):
                        pass
                else:
                    await channel.unary_unary(path)(self.message, timeout=LONGEST_S, metadata=shown)
            except grpc.aio.AioRpcError as error:
                return str(error.code().name)
            return "OK"


class Call(Protocol):
    """A call over any protocol."""

    @property
    def num_bytes(self) -> int: ...

    async def send(self, target: Target) -> str:
        """Returns how the call ended, in a few words."""
        ...
