"""Ports of a cluster stay reserved from start to end."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest

from quire.cluster.endpoints import LOOPBACK, Endpoints
from quire.shared import ports
from quire.shared.errors import FailedPrecondition, InvalidArgument


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    held = Endpoints()
    yield held
    held.close()


def listener(port: int, *, share: bool) -> socket.socket:
    bound = ports.bind(LOOPBACK, port, "grpc_port", share=share)
    bound.listen()
    return bound


def test_a_service_gets_every_connection_of_a_held_port_and_gets_it_again_after_its_end(endpoints: Endpoints) -> None:
    port = endpoints.hold_port("grpc_port")
    for _ in range(10):
        with listener(port, share=True) as service:
            for _ in range(5):
                with socket.create_connection((LOOPBACK, port)) as client, service.accept()[0] as accepted:
                    assert accepted.getpeername() == client.getsockname()


def test_nobody_else_gets_a_held_port_while_no_service_listens(endpoints: Endpoints) -> None:
    port = endpoints.hold_port("grpc_port")
    with pytest.raises(FailedPrecondition, match="is in use"):
        listener(port, share=False)


def test_a_port_in_use_is_refused_by_name_with_a_way_out(endpoints: Endpoints) -> None:
    with listener(0, share=False) as other:
        port = other.getsockname()[1]
        with pytest.raises(FailedPrecondition, match=rf"^http_port: 127.0.0.1:{port} is in use; .*--http-port 0$"):
            endpoints.hold_port("http_port", LOOPBACK, port)


def test_two_clusters_never_share_a_port(endpoints: Endpoints) -> None:
    port = endpoints.hold_port("http_port")
    second = Endpoints()
    with pytest.raises(FailedPrecondition, match="is in use"):
        second.hold_port("http_port", LOOPBACK, port)
    with listener(port, share=True), pytest.raises(FailedPrecondition, match="is in use"):
        second.hold_port("http_port", LOOPBACK, port)
    second.close()


def test_closed_connections_do_not_keep_a_port_from_the_next_cluster(endpoints: Endpoints) -> None:
    first = Endpoints()
    port = first.hold_port("http_port")
    with listener(port, share=True) as service:
        client = socket.create_connection((LOOPBACK, port))
        service.accept()[0].close()  # the side that closes first keeps the connection in TIME_WAIT
        client.close()
    first.close()
    assert endpoints.hold_port("http_port", LOOPBACK, port) == port


def test_a_host_of_another_machine_is_named(endpoints: Endpoints) -> None:
    with pytest.raises(FailedPrecondition, match=r"http_port: cannot listen on 192.0.2.1:0: "):
        endpoints.hold_port("http_port", "192.0.2.1")
    with pytest.raises(InvalidArgument, match="host: 'no host'"):
        endpoints.hold_port("http_port", "no host")


def test_unix_sockets_lie_where_only_this_user_may_look(endpoints: Endpoints) -> None:
    folder = endpoints.path("redis").parent
    assert folder.stat().st_mode & 0o777 == 0o700
    endpoints.close()
    assert not folder.exists()


@pytest.mark.parametrize("errno_of", [errno.EROFS, errno.ENOSPC])
def test_without_room_for_a_secret_the_reason_says_where_it_is_looked_for(errno_of: int) -> None:
    def refuse(**_: str) -> str:
        raise OSError(errno_of, os.strerror(errno_of))

    endpoints = Endpoints(refuse)
    with pytest.raises(FailedPrecondition, match=f"{os.strerror(errno_of)}.*; set TMPDIR to a folder"):
        endpoints.secret("cluster-secret")
