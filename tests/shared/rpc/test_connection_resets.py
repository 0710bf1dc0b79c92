"""Connections whose clients reset call after call are closed; other clients do not notice them."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2 as pb

from quire.shared.errors import Unauthenticated
from quire.shared.rpc import peer_sockets
from quire.shared.rpc.connection_resets import MOST_REMEMBERED, PER_SECOND, ConnectionResets
from quire.shared.rpc.guard import CallGuard
from quire.shared.rpc.server import Server
from tests.attacks import floods
from tests.attacks.calls import Target

ANY = pb.HealthCheckRequest(service="").SerializeToString()
PEER, OTHER = "ipv4:192.0.2.1:1000", "ipv4:192.0.2.1:1001"


class Resets:
    """Counter with a controlled clock that records the connections to close."""

    def __init__(self, burst: int) -> None:
        self.now = 0.0
        self.closed: list[str] = []
        self.counted = ConnectionResets(self._close, lambda: self.now, burst)

    def _close(self, peer: str) -> bool:
        self.closed.append(peer)
        return True

    def add(self, count: int, peer: str = PEER) -> None:
        for _ in range(count):
            self.counted.add(peer)


def test_a_burst_is_let_pass_and_one_reset_more_closes_its_connection_alone() -> None:
    resets = Resets(burst=10)
    resets.add(10)
    resets.add(10, OTHER)
    assert resets.closed == []
    resets.add(1)
    assert resets.closed == [PEER]


def test_resets_are_forgotten_with_time() -> None:
    resets = Resets(burst=10)
    for _ in range(100):
        resets.add(10)
        resets.now += 11 / PER_SECOND
    assert resets.closed == []
    resets.add(11)
    assert resets.closed == [PEER]


def test_what_is_remembered_is_bounded() -> None:
    resets = Resets(burst=10)
    resets.add(10)
    for number in range(MOST_REMEMBERED):
        resets.add(1, f"ipv4:192.0.2.2:{number}")
    resets.add(10)
    assert resets.closed == []


@pytest.mark.parametrize(
    ("peer", "found"),
    [
        ("ipv4:127.0.0.1:80", ("127.0.0.1", 80)),
        ("ipv6:%5B::1%5D:80", ("::1", 80)),
        ("ipv6:[::ffff:127.0.0.1]:80", ("127.0.0.1", 80)),
        ("unix:/run/x", None),
        ("", None),
        ("ipv4:127.0.0.1", None),
    ],
)
def test_names_of_peers_are_read(peer: str, found: tuple[str, int] | None) -> None:
    assert peer_sockets.address_of(peer) == found


def test_the_connection_of_a_peer_is_closed_and_no_other() -> None:
    scheme, address = "ipv4", "127.0.0.1"
    with closing(socket.socket()) as listening:
        listening.bind((address, 0))
        listening.listen()
        clients = [socket.create_connection(listening.getsockname()) for _ in range(2)]
        accepted = [listening.accept()[0] for _ in clients]
        port = clients[0].getsockname()[1]
        assert peer_sockets.close(f"{scheme}:{address}:{port}")
        assert not peer_sockets.close(f"{scheme}:192.0.2.1:{port}")
        assert clients[0].recv(1) == b""
        accepted[1].sendall(b"y")
        assert clients[1].recv(1) == b"y"
        for one in (*clients, *accepted):
            one.close()


@asynccontextmanager
async def serving(**arguments: Any) -> AsyncIterator[str]:
    server = Server("127.0.0.1", 0, ("a.Service",), **arguments)
    await server.start()
    try:
        async with asyncio.timeout(60):
            yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(grace_s=0)


@pytest.mark.parametrize("path", [floods.CHECK, "/a.Service/Method"], ids=["served", "unknown"])
async def test_other_clients_are_answered_while_one_resets_thousands_of_calls(path: str) -> None:
    async with serving() as address, grpc.aio.insecure_channel(address) as channel:
        check = channel.unary_unary(floods.CHECK)
        (flood,) = floods.resets(path, 20_000)
        attack = asyncio.ensure_future(flood.send(Target("", address)))
        num_answered = 0
        while not attack.done() or num_answered < 20:
            assert await check(ANY)
            num_answered += 1
        ended = await attack
        assert ended == "closed" or int(ended.split()[0]) > 10_000  # gRPC itself refuses most of them


async def test_resets_of_calls_without_a_key_count_as_well() -> None:
    guard = CallGuard(lambda _: Unauthenticated("no key"))
    async with serving(interceptors=[guard]) as address, grpc.aio.insecure_channel(address) as channel:
        (flood,) = floods.resets("/a.Service/Method", 20_000)
        ended = await flood.send(Target("", address))
        assert ended == "closed" or int(ended.split()[0]) > 10_000
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/a.Service/Method")(ANY)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_connection_with_headers_beyond_the_bound_is_closed() -> None:
    """Its client acknowledges no settings, so gRPC does not check its headers."""
    async with serving() as address:
        (flood,) = floods.references(floods.CHECK, calls=200)
        assert await flood.send(Target("", address)) == "closed"
