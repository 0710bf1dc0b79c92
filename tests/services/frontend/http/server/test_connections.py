"""Connections that are cheap for a client and costly for a server: idle, incomplete, slow, not reading, or many."""

from __future__ import annotations

import asyncio
import itertools
import socket
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx
import pytest

from quire.services.frontend.http.server.connection_limiter import ConnectionLimiter
from quire.services.frontend.http.server.server import ACCEPTED_AT_ONCE
from quire.shared.metrics.frontend import FrontendMetrics
from quire.shared.pb.common.v1.sampling_pb2 import SamplingParams
from quire.shared.pb.inference.v1 import inference_pb2
from quire.shared.settings.connection_limits import ConnectionLimits
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually, loop_turns

QUICK = {"header_s": 2, "body_s": 2, "write_s": 2}
HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
SHORT = {"model": "tiny", "prompt": "x", "max_tokens": 3}


class Peer:
    """A connection controlled by the test."""

    def __init__(self, frontend: Running, *, takes_little: bool = False) -> None:
        """Connects. `takes_little`: the system buffers a few kilobytes for it instead of megabytes."""
        self._host, _, self._port = frontend.frontend.http_address.rpartition(":")
        self._takes_little = takes_little

    async def __aenter__(self) -> Peer:
        sock = socket.socket()
        if self._takes_little:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)  # the peer scales its window by it
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, (self._host, int(self._port)))
        self.reader, self.writer = await asyncio.open_connection(sock=sock)
        return self

    @asynccontextmanager
    async def having_sent(self, data: bytes) -> AsyncIterator[Peer]:
        """Connects with data already sent before the server accepts."""
        connected = socket.create_connection((self._host, int(self._port)))
        connected.sendall(data)
        self.reader, self.writer = await asyncio.open_connection(sock=connected)
        try:
            yield self
        finally:
            self.writer.close()

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def said(self) -> bytes:
        """Returns everything until the server closes."""
        async with asyncio.timeout(60):
            try:
                return await self.reader.read()
            except ConnectionResetError:
                return b""

    async def goes_on(self, piece: bytes = b" ") -> None:
        """Sends until that fails."""
        async with asyncio.timeout(60):
            while True:
                self.writer.write(piece)
                await self.writer.drain()
                await asyncio.sleep(0.05 if len(piece) == 1 else 0)


async def served(frontend: Running) -> bool:
    return (await frontend.http.post("/v1/completions", json=SHORT)).status_code == 200


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"POST /v1/comp", b"408"),
        (HEAD, b"408"),
        (HEAD + b"content-length: 100\r\n\r\n{", b"408"),
        (HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n", b"408"),
    ],
)
async def test_a_stalled_request_is_closed(folder: Path, sent: bytes, status: bytes) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, connections=QUICK) as frontend:
        async with AsyncExitStack() as stack:
            peers = []
            for _ in range(50):
                peers.append(await stack.enter_async_context(Peer(frontend)))
                peers[-1].writer.write(sent)  # at once, so that a suspended machine does not delay it
            assert await served(frontend)
            for answer in await asyncio.gather(*(peer.said() for peer in peers)):
                assert answer[9:12] == status
        metrics = await frontend.metrics()
    closed = {k: v for k, v in metrics.items() if k.startswith("quire_frontend_closed_connections_total")}
    assert sum(closed.values()) == 50
    assert script.submissions  # only those of `served`


def test_an_unused_connection_is_closed_by_the_client() -> None:
    """Otherwise a call could race with the server's close."""
    of_httpx, of_load_balancers = httpx.Limits().keepalive_expiry, 60
    assert of_httpx is not None
    assert ConnectionLimits().idle_s > max(of_httpx, of_load_balancers)


async def test_a_drop_of_body_at_a_time_does_not_buy_time(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, connections=QUICK) as frontend,
        Peer(frontend) as peer,
    ):
        peer.writer.write(HEAD + b"content-length: 1000000\r\n\r\n")

        async def drip() -> None:
            while True:
                peer.writer.write(b" ")
                await asyncio.sleep(0.05)

        dripping = asyncio.create_task(drip())
        assert (await peer.said())[9:12] == b"408"
        dripping.cancel()


async def test_a_last_response_arrives_although_input_is_unread(folder: Path) -> None:
    limits = {**QUICK, "header_bytes": 10_000_000}
    async with running(folder, until_health=(503,), connections=limits) as frontend, Peer(frontend) as peer:
        peer.writer.write(HEAD)
        await asyncio.sleep(0.1)
        peer.writer.write(b"a: b\r\n" * 100_000)  # more than one loop iteration reads
        time.sleep(QUICK["header_s"])  # noqa: ASYNC251 - which does not turn, so that time is up with some of it unread
        assert (await peer.said())[9:12] == b"408"
        with pytest.raises(ConnectionError):  # the server closes it, though the peer does not
            await peer.goes_on()


async def test_a_call_refused_by_its_headers_is_answered_while_its_body_is_sent(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    last = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n"
    long = last % 400_000 + b" " * 400_000  # more than one loop iteration reads
    short, odd = last % 2 + b"{}", HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\nodd"
    script = ScriptedScheduler()
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        frontend.frontend.ingress.admission.lease().acquire(1, 1)
        for sent in [long] * 5 + [short * 2, short.replace(b"1.1", b"1.0") * 2, short + b"\0", odd]:
            async with Peer(frontend).having_sent(sent) as peer:
                said = await peer.said()
                assert said[9:12] == b"429"
                assert said.count(b"HTTP/1.1 ") == 1
    assert not [record for record in caplog.records if record.exc_info]


async def test_endless_headers_are_cut_off(folder: Path) -> None:
    async with running(folder, until_health=(503,), connections={"header_bytes": 10_000}) as frontend:
        for chunk in (b"a" * 20_000, b"a: b\r\n" * 4000):
            async with Peer(frontend) as peer:
                peer.writer.write(HEAD + chunk)
                assert (await peer.said())[9:12] == b"431"


CHUNKED = HEAD + b"transfer-encoding: chunked\r\n"
BODY = b'{"model": "tiny", "prompt": "x", "max_tokens": 3}'


@pytest.mark.parametrize("behind", [b"a" * 10_000, b"a: b\r\n" * 2000, b"a: " + b"b" * 10_000])
async def test_endless_trailers_are_cut_off(folder: Path, behind: bytes) -> None:
    """Trailers follow the last chunk and do not count as the body, so they have a limit of their own."""
    sent = CHUNKED + b"\r\n%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, connections={"header_bytes": 20_000, "body_s": 600}) as frontend,
        Peer(frontend) as peer,
    ):
        peer.writer.write(sent)
        with pytest.raises(ConnectionError):
            await peer.goes_on(behind)
        assert await served(frontend)
        assert (await frontend.metrics())["quire_frontend_closed_connections_total{reason=headers}"] == 1
    assert len(script.submissions) == 1  # only that of `served`


async def test_trailers_become_no_headers(folder: Path) -> None:
    """RFC 9110 6.5.1. Sent byte by byte, so that the call has begun when the trailers arrive."""
    script = ScriptedScheduler(count_up)
    sent = b"1\r\n{\r\n%x\r\n%b\r\n0\r\nx-request-id: late\r\nhost: b\r\n\r\n" % (len(BODY) - 1, BODY[1:])
    async with (
        scheduler(script),
        running(folder, script.address, connections={"header_bytes": 200}) as frontend,
        Peer(frontend) as peer,
    ):
        peer.writer.write(CHUNKED + b"connection: close\r\n\r\n")
        for byte in sent:
            peer.writer.write(bytes([byte]))
            await loop_turns()
        said = await peer.said()
    assert said[9:12] == b"200"
    assert b"late" not in said


@pytest.mark.parametrize(
    "cut", [b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\nodd\r\n"]
)
async def test_a_disconnect_within_a_body_is_no_internal_error(
    folder: Path, cut: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        async with Peer(frontend) as peer:
            peer.writer.write(HEAD + cut)
            await peer.writer.drain()
            peer.writer.write_eof()
            await peer.said()
        kinds: set[str] = set()
        async with asyncio.timeout(60):
            while not kinds:
                counted = await frontend.metrics()
                mine = [name for name in counted if "handler=/v1/completions" in name and counted[name]]
                kinds = {kind for kind in ("4xx", "5xx") for name in mine if f"={kind}" in name}
    assert kinds == {"4xx"}
    assert not [record for record in caplog.records if record.exc_info]


async def test_a_client_that_never_reads_loses_its_connection_and_lease(folder: Path) -> None:
    script = ScriptedScheduler(count_up, step_s=0.0002)
    script.tokens_per_step = 20
    script.set_view(max_model_len=200_000)
    body = b'{"model": "tiny", "prompt": "x", "max_tokens": 150000, "ignore_eos": true, "stream": true, "logprobs": 5}'
    async with (
        scheduler(script),
        running(folder, script.address, connections=QUICK) as frontend,
        Peer(frontend, takes_little=True) as peer,
    ):
        peer.writer.transport.pause_reading()  # type: ignore[attr-defined]
        peer.writer.write(HEAD + b"content-length: %d\r\n\r\n" % len(body) + body)
        async with asyncio.timeout(60):
            while not (await frontend.metrics())["quire_frontend_closed_connections_total{reason=write}"]:
                assert await served(frontend)
                await asyncio.sleep(0.1)
        await frontend.until_idle()


async def test_one_connection_too_many_gets_a_refusal(folder: Path) -> None:
    async with (
        running(folder, until_health=(503,), connections={"per_address": 20, "header_s": 60}) as frontend,
        AsyncExitStack() as stack,
    ):
        await frontend.http.aclose()
        peers = [await stack.enter_async_context(Peer(frontend)) for _ in range(20)]
        async with Peer(frontend) as one_more:
            assert (await one_more.said())[9:12] == b"503"
        for _ in range(5):
            async with Peer(frontend).having_sent(HEAD + b"content-length: 2\r\n\r\n{}") as one_more:
                assert (await one_more.said())[9:12] == b"503"
        peers[0].writer.close()
        await peers[0].writer.wait_closed()
        async with asyncio.timeout(60):
            while True:
                async with Peer(frontend) as another:
                    another.writer.write(b"GET /ping HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
                    if b"no scheduler session" in await another.said():
                        break


def test_descriptors_are_left_for_everything_else() -> None:
    connections = ConnectionLimiter(ConnectionLimits(reserved=100), 1100, FrontendMetrics("m", 100))
    first = sum(connections.acquire("a") for _ in range(2000))
    second = sum(connections.acquire("b") for _ in range(2000))
    assert connections.max_grpc == 333
    assert (first, second) == (333, 333)
    assert connections.acquire("c")
    assert not connections.acquire("c")
    connections.release("a")
    assert connections.acquire("c")
    assert [connections.acquire_linger() for _ in range(26)] == [True] * 25 + [False]
    connections.release_linger()
    assert connections.acquire_linger()


GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + b"\4" + bytes(5)  # and empty settings


class Grpc:
    """Connections to the gRPC port, with or without the HTTP/2 preface."""

    def __init__(self, frontend: Running) -> None:
        self._host, _, self._port = frontend.frontend.grpc_address.rpartition(":")
        self._opened: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = []

    async def open(self, count: int, *, greeting: bytes = GREETING, num_addresses: int = 1) -> None:
        for number in range(count):
            own = (f"127.0.0.{1 + number % num_addresses}", 0)
            reader, writer = await asyncio.open_connection(self._host, int(self._port), local_addr=own)
            writer.write(greeting)
            self._opened.append((reader, writer))

    async def until_open(self, count: int) -> None:
        await eventually(self.num_open, lambda found: found == count)

    async def num_open(self) -> int:
        return [await self._has_ended(reader) for reader, _ in self._opened].count(False)

    async def _has_ended(self, reader: asyncio.StreamReader) -> bool:
        try:
            async with asyncio.timeout(0.01):
                while await reader.read(1 << 16):
                    pass
            return True
        except ConnectionError:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        for _, writer in self._opened:
            writer.close()


async def test_grpc_connections_of_one_address_have_a_bound_and_those_that_are_there_stay(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, connections={"per_address": 20, "header_s": 60}) as frontend,
    ):
        await talk(frontend)
        clients = Grpc(frontend)
        try:
            await clients.open(50)
            await clients.until_open(19)  # and the one that talks
            assert (await frontend.metrics())["quire_frontend_closed_connections_total{reason=too_many}"] == 31
            await talk(frontend)
        finally:
            clients.close()


@pytest.mark.parametrize(("num_addresses", "kept"), [(5, 19), (1, 9)])  # one address gets half
async def test_grpc_connections_of_all_have_a_bound(folder: Path, num_addresses: int, kept: int) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, connections={"grpc": 20, "header_s": 60}) as frontend:
        await talk(frontend)
        clients = Grpc(frontend)
        try:
            await clients.open(50, num_addresses=num_addresses)
            await clients.until_open(kept)
            await talk(frontend)
            assert await clients.num_open() == kept
        finally:
            clients.close()


async def test_grpc_connections_that_say_nothing_or_ask_nothing_are_closed(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    limits = {"header_s": 1, "grpc_idle_s": 2}
    async with scheduler(script), running(folder, script.address, connections=limits) as frontend:
        clients = Grpc(frontend)
        try:
            await clients.open(5, greeting=b"")
            await clients.open(5)
            await clients.until_open(0)
            await talk(frontend)
            assert await clients.num_open() == 0
        finally:
            clients.close()


async def talk(frontend: Running) -> None:
    """Calls over the test's channel, which reconnects if it was closed."""
    message = inference_pb2.GenerateRequest(text="x", sampling=SamplingParams(max_tokens=3))
    deltas = [delta async for delta in frontend.inference.Generate(message, timeout=60, wait_for_ready=True)]
    assert deltas[-1].finish_reason


async def test_connections_that_come_at_once_are_accepted_in_portions_and_none_is_dropped(folder: Path) -> None:
    """The loop runs other tasks between two portions; further connections wait in the backlog."""
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        sockets = [socket.socket() for _ in range(1500)]
        try:
            for sock in sockets:
                sock.settimeout(60)
                sock.connect((host, int(port)))  # the loop is blocked meanwhile
            kept: list[float] = []
            while not kept or kept[-1] < len(sockets):
                await loop_turns()
                kept.append(frontend.frontend.ingress.connections.num_open)
        finally:
            for sock in sockets:
                sock.close()
    steps = [after - before for before, after in itertools.pairwise(kept)]
    assert max(steps) <= 2 * ACCEPTED_AT_ONCE
