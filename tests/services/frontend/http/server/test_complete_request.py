"""A request in one piece is refused without a parser, with the same answer as one that arrives in pieces."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from quire.services.frontend.http.server import complete_request
from quire.services.frontend.http.server.protocol import AdmittingHttpProtocol
from tests.observing import calls_of
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler

BODY = b'{"prompt": "x"}'
LINE = b"POST /v1/completions HTTP/1.1\r\n"
LENGTH = b"content-length: %d\r\n" % len(BODY)
ENOUGH = 4096


def call(*headers: bytes, line: bytes = LINE, body: bytes = BODY) -> bytes:
    return line + b"host: localhost\r\n" + b"".join(headers) + b"\r\n" + body


def test_what_is_plain_is_read() -> None:
    for headers in ([LENGTH], [b"accept: */*\r\n", b"Content-Length:  15\r\n", b"Connection: Keep-Alive\r\n"]):
        assert complete_request.read(call(*headers), ENOUGH) == (b"/v1/completions", b"")
    named = complete_request.read(call(LENGTH, b"X-Request-Id: abc\r\n", line=b"POST /llm/x?y=1 HTTP/1.1\r\n"), ENOUGH)
    assert named == (b"/llm/x?y=1", b"abc")
    assert complete_request.read(call(b"content-length: 0\r\n", body=b""), ENOUGH) is not None


@pytest.mark.parametrize(
    "sent",
    [
        call(LENGTH)[:-1],
        call(LENGTH) + b"P",
        call(LENGTH)[: -len(BODY) - 1],
        call(),
        call(LENGTH, LENGTH),
        call(b"content-length: 1e1\r\n"),
        call(b"content-length: +15\r\n"),
        call(b"content-length: 15, 15\r\n"),
        call(b"content-length: 9999999999\r\n"),
        call(LENGTH, b"transfer-encoding: chunked\r\n"),
        call(LENGTH, b"Transfer-Encoding : chunked\r\n"),
        call(LENGTH, b"x: y\ntransfer-encoding: chunked\r\n"),
        call(LENGTH, b"x: y\rtransfer-encoding: chunked\r\n"),
        call(LENGTH, b"connection: close\r\n"),
        call(LENGTH, b"expect: 100-continue\r\n"),
        call(LENGTH, b"upgrade: websocket\r\n"),
        call(LENGTH, b"x-request-id: a\r\n", b"x-request-id: b\r\n"),
        call(LENGTH, line=b"POST /v1/completions HTTP/1.0\r\n"),
        call(LENGTH, line=b"GET /v1/completions HTTP/1.1\r\n"),
        call(LENGTH, line=b"POST /v1/completions x HTTP/1.1\r\n"),
        call(LENGTH, b"x: " + b"y" * ENOUGH + b"\r\n"),
        b"\r\n" + call(LENGTH),
        b"",
    ],
)
def test_whatever_else_may_decide_where_a_call_ends_is_left_to_the_parser(sent: bytes) -> None:
    assert complete_request.read(sent, ENOUGH) is None


async def answer(reader: asyncio.StreamReader) -> bytes:
    async with asyncio.timeout(60):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return head + await reader.readexactly(length)


async def exchange(frontend: Running, sent: list[bytes]) -> list[bytes]:
    """Sends calls on one connection, each in two pieces if it contains a `|`, and returns the answers."""
    host, _, port = frontend.frontend.http_address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    answers = []
    for pieces in sent:
        for piece in pieces.split(b"|"):
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.02)
        answers.append(await answer(reader))
    writer.close()
    return answers


async def test_answers_are_the_same_and_so_is_what_is_counted(folder: Path) -> None:
    at_once: list[bool] = []
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address, max_inflight_requests=1) as frontend:
        with calls_of(AdmittingHttpProtocol._refuse_whole, on_return=lambda call: at_once.append(call.result)):
            with frontend.frontend.ingress.admission.lease() as lease:
                lease.acquire(1, 0)
                named = (LENGTH, b"x-request-id: abc\r\n")
                whole = [call(LENGTH), call(*named), call(*named, line=b"POST /v1/messages/ HTTP/1.1\r\n")]
                in_drops = [sent[:50] + b"|" + sent[50:] for sent in whole]
                first = await exchange(frontend, whole)
                assert at_once == [True, True, True]
                assert first == await exchange(frontend, in_drops)
                assert [one[9:12] for one in first] == [b"429"] * 3
                assert [one.count(b"x-request-id: abc") for one in first] == [0, 1, 1]
                mixed = await exchange(frontend, [whole[0], in_drops[1], whole[1], in_drops[0]])
                assert mixed == [first[0], first[1], first[1], first[0]]
                other = await exchange(
                    frontend, [whole[0], b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", whole[0]]
                )
                assert [one[9:12] for one in other] == [b"429", b"200", b"429"]
                metrics = await frontend.metrics()
            (served,) = await exchange(
                frontend, [call(b"content-length: 34\r\n", body=b'{"prompt": "x", "max_tokens": 1 } ')]
            )
            assert served[9:12] == b"200"
    counted = {name: value for name, value in metrics.items() if name.startswith("http_requests_total")}
    refused = {name: value for name, value in counted.items() if "4xx" in name}
    assert sum(refused.values()) == 3 + 3 + 4 + 2, counted


async def test_a_connection_that_is_idle_after_a_refusal_is_closed(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with (
        scheduler(script),
        running(folder, script.address, max_inflight_requests=1, connections={"idle_s": 1}) as frontend,
    ):
        with frontend.frontend.ingress.admission.lease() as lease:
            lease.acquire(1, 0)
            host, _, port = frontend.frontend.http_address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(call(LENGTH))
            assert (await answer(reader))[9:12] == b"429"
            async with asyncio.timeout(60):
                assert await reader.read() == b""
            writer.close()
