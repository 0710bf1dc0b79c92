"""An HTTP server on loopback that answers each path as a test says, also in ways that no server should."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def answer(content: bytes, status: str = "200 OK", *headers: str) -> Answer:
    """Returns an answer with a body of known length."""

    async def write(writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-length: {len(content)}", *headers, "", ""]
        writer.write("\r\n".join(lines).encode() + content)

    return write


def redirect(location: str, status: str = "302 Found") -> Answer:
    return answer(b"", status, f"location: {location}")


def raw(data: bytes) -> Answer:
    """Returns an answer of these bytes alone."""

    async def write(writer: asyncio.StreamWriter) -> None:
        writer.write(data)

    return write


async def endless(writer: asyncio.StreamWriter) -> None:
    """Sends a body without an end."""
    writer.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
    while True:
        writer.write(b"10000\r\n" + bytes(65536) + b"\r\n")
        await writer.drain()


async def silent(writer: asyncio.StreamWriter) -> None:
    """Answers nothing."""
    await asyncio.Event().wait()


@dataclass(slots=True)
class MediaServer:
    """The paths that the server answers, and what was asked for."""

    port: int
    answers: dict[str, list[Answer]]
    asked: list[str] = field(default_factory=list)
    hosts: list[str] = field(default_factory=list)
    serving: set[asyncio.Task[None]] = field(default_factory=set)

    def url(self, path: str, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.serving.add(task)
        task.add_done_callback(self.serving.discard)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            path = head.split(" ")[1]
            self.asked.append(path)
            self.hosts += [line[6:] for line in head.split("\r\n") if line.lower().startswith("host: ")]
            answers = self.answers[path]
            await (answers.pop(0) if len(answers) > 1 else answers[0])(writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def media_server(answers: Mapping[str, Answer | list[Answer]]) -> AsyncIterator[MediaServer]:
    """`answers`: by path; of several the last is repeated."""
    known = {path: one if isinstance(one, list) else [one] for path, one in answers.items()}
    found = MediaServer(0, known)
    server = await asyncio.start_server(found.serve, "127.0.0.1", 0)
    found.port = server.sockets[0].getsockname()[1]
    try:
        yield found
    finally:
        server.close()
        for task in found.serving:
            task.cancel()
        await asyncio.gather(*found.serving, return_exceptions=True)
