"""Peers that every port must refuse: expired certificates, other authorities, outdated TLS."""

from __future__ import annotations

import asyncio
import datetime
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2 as pb

from quire.shared.rpc.channel import connect
from quire.shared.rpc.server import Server
from quire.shared.security.tls_files import Tls

CHECK = "/grpc.health.v1.Health/Check"
LONG_AGO = datetime.datetime(2001, 1, 1, tzinfo=datetime.UTC)
ALERT = b"\x15"  # the content type of a record (RFC 8446, section 5.1)


def issued(folder: Path, name: str, ca: trustme.CA, trusted: trustme.CA, **how: datetime.datetime) -> dict[str, str]:
    """Returns files of a certificate issued by `ca`, and of the authority that its owner trusts."""
    made = ca.issue_cert("127.0.0.1", **how)
    paths = {kind: folder / f"{name}.{kind}" for kind in ("cert", "key", "ca")}
    paths["cert"].write_bytes(b"".join(blob.bytes() for blob in made.cert_chain_pems))
    paths["key"].write_bytes(made.private_key_pem.bytes())
    paths["key"].chmod(0o600)
    paths["ca"].write_bytes(trusted.cert_pem.bytes())
    return {kind: str(path) for kind, path in paths.items()}


@asynccontextmanager
async def listening(tls: Tls) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0, (), tls=tls)
    await server.start()
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0)


async def ask(address: str, tls: Tls) -> grpc.StatusCode:
    async with connect(address, tls) as channel:
        try:
            await channel.unary_unary(CHECK)(pb.HealthCheckRequest().SerializeToString(), timeout=20)
        except grpc.aio.AioRpcError as error:
            return error.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("who", ["good", "expired", "of another authority"])
async def test_a_caller_shows_a_certificate_that_is_good_today(tmp_path: Path, who: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    expired = {"not_after": LONG_AGO, "not_before": LONG_AGO - datetime.timedelta(days=1)}
    own = issued(
        tmp_path, "caller", other if who == "of another authority" else ca, ca, **expired if who == "expired" else {}
    )
    async with listening(Tls(**issued(tmp_path, "server", ca, ca), clients="require")) as address:
        answer = await ask(address, Tls(**own))
    assert answer is (grpc.StatusCode.OK if who == "good" else grpc.StatusCode.UNAVAILABLE)


@pytest.mark.parametrize("who", ["expired", "of another authority"])
async def test_a_server_shows_one_that_is_good_today(tmp_path: Path, who: str) -> None:
    ca, other = trustme.CA(), trustme.CA()
    expired = {"not_after": LONG_AGO, "not_before": LONG_AGO - datetime.timedelta(days=1)}
    shown = issued(
        tmp_path, "server", other if who == "of another authority" else ca, ca, **expired if who == "expired" else {}
    )
    async with listening(Tls(**shown)) as address:
        assert await ask(address, Tls(ca=issued(tmp_path, "caller", ca, ca)["ca"])) is grpc.StatusCode.UNAVAILABLE


def client_hello(version: int) -> bytes:
    """Offers nothing newer than `version` (0x0301: TLS 1.0), with suites that such servers took."""
    suites = struct.pack(">HHHH", 6, 0xC013, 0xC014, 0x002F)
    body = struct.pack(">H", version) + bytes(32) + b"\0" + suites + b"\x01\0"
    handshake = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16" + struct.pack(">HH", 0x0301, len(handshake)) + handshake


@pytest.mark.parametrize("version", [0x0300, 0x0301, 0x0302])
@pytest.mark.parametrize("clients", ["none", "require"])
async def test_no_port_speaks_older_tls_than_1_2(tmp_path: Path, version: int, clients: str) -> None:
    ca = trustme.CA()
    tls = Tls.model_validate({**issued(tmp_path, "server", ca, ca), "clients": clients})
    async with listening(tls) as address, asyncio.timeout(30):
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(client_hello(version))
        answer = await reader.read()
        writer.close()
    assert answer[:1] in (b"", ALERT)  # closed without a word, or with one; never a ServerHello


async def test_a_client_that_offers_both_gets_the_newest(tmp_path: Path) -> None:
    ca = trustme.CA()
    context = ssl.create_default_context()
    ca.configure_trust(context)
    context.set_alpn_protocols(["h2"])
    async with listening(Tls(**issued(tmp_path, "server", ca, ca))) as address:
        host, _, port = address.rpartition(":")
        _, writer = await asyncio.open_connection(host, int(port), ssl=context)
        found = writer.get_extra_info("ssl_object").version()
        writer.close()
    assert found == "TLSv1.3"
