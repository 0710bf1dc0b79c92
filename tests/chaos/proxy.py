"""A TCP relay between two services that can cut, delay or swallow traffic."""

from __future__ import annotations

import asyncio
import contextlib

CHUNK = 65_536


class Proxy:
    """Listens on a free port and relays to `target` (HOST:PORT)."""

    def __init__(self, target: str) -> None:
        self._host, port = target.rsplit(":", 1)
        self._port = int(port)
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self.delay_s = 0.0
        self.open = asyncio.Event()
        self.open.set()
        self.port = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    def cut(self) -> None:
        """Breaks every connection; new ones are accepted."""
        for writer in list(self._writers):
            writer.transport.abort()

    def swallow(self) -> None:
        """Drops all traffic without closing connections."""
        self.open.clear()

    def restore(self) -> None:
        self.open.set()

    async def close(self) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.close()
            return
        await asyncio.gather(self._pass_on(reader, far_writer), self._pass_on(far_reader, writer))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await self.open.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()
        self._writers.discard(writer)
        writer.close()
