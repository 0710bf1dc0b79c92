"""TLS connections that begin no handshake, or never end it, on a port with TLS."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trustme
import uvloop

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter
from quire.services.frontend.http.server.protocol import AdmissionHooks
from quire.services.frontend.http.server.server import HttpApplication, HttpServer
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.security.tls_files import Tls
from quire.shared.settings.connection_limits import ConnectionLimits
from tests.shared.security.test_tls import files

HELLO = b"\x16\x03\x01\x02\x00\x01"  # the first bytes of a client's
PATIENCE_S = 60
Run = Callable[[Any], Any]

# The event loops of services and of tests.
loops = pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@asynccontextmanager
async def serving(folder: Path, limits: ConnectionLimits) -> AsyncIterator[tuple[int, httpx.AsyncClient]]:
    ca = trustme.CA()
    server = HttpServer(
        HttpApplication(app, AdmissionHooks(lambda *_: None, lambda: False), app),
        "127.0.0.1",
        0,
        share_port=False,
        drain_timeout_s=1,
        tls=Tls(**files(folder, "server", ca)),
        connections=ConnectionLimiter(limits, 10_000, FrontendMetrics("tiny", 64)),
    )
    task = asyncio.create_task(server.run())
    await server.listening()
    trusted = ssl.create_default_context()
    ca.configure_trust(trusted)
    try:
        async with httpx.AsyncClient(base_url=f"https://localhost:{server.port}", verify=trusted) as client:
            yield server.port, client
    finally:
        server.stop()
        await task


async def closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(PATIENCE_S):
        with suppress(ConnectionResetError):
            assert await reader.read() == b""


@loops
def test_a_connection_without_handshake_is_closed(tmp_path: Path, run: Run) -> None:
    run(_who_does_not_greet(tmp_path))


async def _who_does_not_greet(tmp_path: Path) -> None:
    async with serving(tmp_path, ConnectionLimits(header_s=3)) as (port, client):
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        for _, writer in silent[:10]:
            writer.write(HELLO)
        assert (await client.get("/")).text == "ok"
        await asyncio.gather(*(closed(reader) for reader, _ in silent))
        for _, writer in silent:
            writer.close()


@loops
def test_one_too_many_is_closed_before_its_handshake(tmp_path: Path, run: Run) -> None:
    """A closed connection frees its place, whether its handshake was done or not."""
    run(_one_too_many(tmp_path))


async def _one_too_many(tmp_path: Path) -> None:
    limits = ConnectionLimits(header_s=600, per_address=3, reserved=4)  # five open ones of one address
    async with serving(tmp_path, limits) as (port, client):
        for _ in range(2):
            assert (await client.get("/", headers={"connection": "close"})).text == "ok"
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(9)]
            await asyncio.gather(*(closed(reader) for reader, _ in silent[5:]))
            for _, writer in silent:
                writer.close()
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    try:
                        assert (await client.get("/", headers={"connection": "close"})).text == "ok"
                        break
                    except (httpx.TransportError, ssl.SSLError):
                        continue
