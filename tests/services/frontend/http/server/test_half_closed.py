"""Clients that half-close after the request are answered; those that close are detected."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.waiting import eventually

ASKED = {"model": "tiny", "prompt": "x", "max_tokens": 3}


def request(method: str = "POST", path: str = "/v1/completions", version: str = "1.1", **changes: Any) -> bytes:
    body = json.dumps({**ASKED, **changes}).encode() if method == "POST" else b""
    return f"{method} {path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class HalfClosing:
    """A connection whose client has sent everything and half-closed."""

    def __init__(self, frontend: Running, sent: bytes) -> None:
        host, _, port = frontend.frontend.http_address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)))
        self.socket.sendall(sent)
        self.socket.shutdown(socket.SHUT_WR)

    async def answer(self) -> bytes:
        reader, writer = await asyncio.open_connection(sock=self.socket)
        async with asyncio.timeout(60):
            said = await reader.read()
        writer.close()
        return said


@pytest.mark.parametrize(
    ("sent", "status", "ends"),
    [
        (request(), b"200", b"}"),
        (request(version="1.0"), b"200", b"}"),
        (request(stream=True), b"200", b"data: [DONE]\n\n\r\n0\r\n\r\n"),
        (request(temperature=-1), b"400", b"}"),
        (request("GET", "/v1/models"), b"200", b"}"),
        (request("GET", "/nothing"), b"404", b"}"),
        (request()[:-3], b"400", b"\r\n\r\n"),
        (b"POST /v1/completions HTTP/1.1\r\nHost:", b"400", b"\r\n\r\n"),
        (request().replace(b"Host", b"Expect: 100-continue\r\nHost"), b"100", b"}"),
    ],
)
async def test_a_client_that_closed_its_half_is_answered(folder: Path, sent: bytes, status: bytes, ends: bytes) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await HalfClosing(frontend, sent).answer()
    assert answer.startswith(b"HTTP/1.1 " + status + b" ")
    assert answer.endswith(ends)


async def test_of_pipelined_requests_all_are_answered(folder: Path) -> None:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await HalfClosing(frontend, request(max_tokens=1) + request(max_tokens=2)).answer()
    counts = re.findall(rb'"completion_tokens":(\d+)', answer)
    assert (answer.count(b"HTTP/1.1 200 OK"), counts) == (2, [b"1", b"2"])


async def test_a_pipeline_that_is_too_long_ends_with_one_answer(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Running calls of the pipeline are cancelled too, since nothing can be written any more."""
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(folder, script.address) as frontend:
        calls = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n" * 20_000
        reader, writer = await asyncio.open_connection(*frontend.frontend.http_address.split(":"))
        writer.write(calls)
        answer = await asyncio.wait_for(reader.read(), 60)
        writer.close()
    assert answer.endswith(
        b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
    )
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "CRITICAL")]


@pytest.mark.parametrize("stream", [False, True])
async def test_probes_show_in_no_answer(folder: Path, stream: bool) -> None:
    """The answer takes long enough for several probes."""
    script = ScriptedScheduler(count_up, step_s=0.3)
    async with scheduler(script), running(folder, script.address) as frontend:
        answer = await HalfClosing(frontend, request(stream=stream)).answer()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"connection: close" in head
    if not stream:
        assert json.loads(body)["usage"]["completion_tokens"] == 3
        return
    while body:
        size, _, body = body.partition(b"\r\n")
        chunk, body = body[: int(size, 16)], body[int(size, 16) + 2 :]
        assert chunk.startswith(b"data: ") or not chunk


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_is_noticed_all_the_same(folder: Path, stream: bool) -> None:
    """A disconnect looks like a half-close until something is written."""
    script = ScriptedScheduler(count_up)
    script.pause()
    async with scheduler(script), running(folder, script.address) as frontend:
        peer = HalfClosing(frontend, request(stream=stream))
        await eventually(lambda: script.submissions)
        peer.socket.close()
        await frontend.until_idle()
        assert not frontend.live
