"""Attacks below HTTP's calls: heads, chunks and trailers that no client writes, as the bytes that arrive."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.attacks.calls import LONGEST_S, SHOWN, Call, Target
from tests.attacks.sizes import MB

BODY = json.dumps({"prompt": "a", "max_tokens": 1}).encode()
POST = "POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + SHOWN
HIDDEN = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"  # must never be read as a call of its own
STATUS = re.compile(rb"HTTP/1\.1 (\d{3}) ")
QUIET_S = 3.0  # without a byte: nothing more comes


@dataclass(frozen=True, slots=True)
class RawHttp:
    """A connection that sends `data` as it is."""

    data: bytes
    reads: bool = True  # else the client never takes its answer

    @property
    def num_bytes(self) -> int:
        return len(self.data)

    async def send(self, target: Target) -> str:
        """Returns the statuses that came, and whether the server closed the connection behind them."""
        host, _, port = target.http.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        sending = asyncio.create_task(self._write(writer))
        try:
            async with asyncio.timeout(LONGEST_S):
                if not self.reads:
                    await sending
                    return "left"
                return await self._statuses(reader, sending)
        except TimeoutError:
            return "no answer"
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            writer.close()

    async def _write(self, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(self.data), 1 << 16):
                writer.write(self.data[start : start + (1 << 16)])
                await writer.drain()

    async def _statuses(self, reader: asyncio.StreamReader, sending: asyncio.Task[None]) -> str:
        data = b""
        closed = False
        while not closed:
            try:
                piece = await asyncio.wait_for(reader.read(1 << 20), QUIET_S)
            except TimeoutError:
                if sending.done():
                    break
                continue
            except ConnectionError:
                closed = True
                break
            closed = not piece
            data += piece
        return _told(data, closed)


def _told(data: bytes, closed: bool) -> str:
    found = [status.decode() for status in STATUS.findall(data)]
    counted = {status: found.count(status) for status in dict.fromkeys(found)}
    words = [status if count == 1 else f"{status} x {count}" for status, count in counted.items()]
    return " ".join([*words, *(["closed"] if closed else [])]) or "nothing"


def call(*headers: str, body: bytes = BODY) -> list[Call]:
    return [RawHttp((POST + "".join(f"{header}\r\n" for header in headers)).encode("latin-1") + b"\r\n" + body)]


def chunked(data: bytes, *headers: str) -> list[Call]:
    return call("transfer-encoding: chunked", *headers, body=data)


def chunks(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)


def _length(count: int = len(BODY)) -> str:
    return f"content-length: {count}"


SMUGGLING: dict[str, Callable[[], list[Call]]] = {
    "HTTP: two lengths": lambda: call(_length(), _length(len(BODY) + len(HIDDEN)), body=BODY + HIDDEN),
    "HTTP: a list of lengths": lambda: call(f"{_length()}, 5", body=BODY + HIDDEN),
    "HTTP: a signed length": lambda: call(f"content-length: +{len(BODY)}"),
    "HTTP: a length of 20 digits": lambda: call("content-length: 18446744073709551617"),
    "HTTP: a length and chunks": lambda: chunked(chunks(BODY) + b"0\r\n\r\n" + HIDDEN, _length(5)),
    "HTTP: chunks under a coding that is none": lambda: call(
        "transfer-encoding: xchunked", _length(), body=BODY + HIDDEN
    ),
    "HTTP: chunked twice": lambda: call("transfer-encoding: chunked, chunked", body=chunks(BODY) + b"0\r\n\r\n"),
    "HTTP: chunks before identity": lambda: call(
        "transfer-encoding: chunked, identity", body=chunks(BODY) + b"0\r\n\r\n"
    ),
    "HTTP: a space before the colon": lambda: call("transfer-encoding : chunked", _length(), body=BODY + HIDDEN),
    "HTTP: a header continued in a second line": lambda: call(_length(), "x: a\r\n b"),
    "HTTP: NUL in a header": lambda: call(_length(), "x: a\0b"),
    "HTTP: a bare line feed in a header": lambda: call(_length(), "x: a\ntransfer-encoding: chunked"),
    "HTTP: a bare carriage return in a header": lambda: call(_length(), "x: a\rtransfer-encoding: chunked"),
    "HTTP: two hosts": lambda: call(_length(), "host: example.com"),
    "HTTP: a signed chunk size": lambda: chunked(b"+%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)),
    "HTTP: a chunk size of 20 digits": lambda: chunked(
        b"10000000000000000000%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
    ),
    "HTTP: a chunk without its end of line": lambda: chunked(b"%x\r\n%bXX0\r\n\r\n" % (len(BODY), BODY)),
    "HTTP: a version of 9.9": lambda: [RawHttp(b"GET /v1/models HTTP/9.9\r\nhost: localhost\r\n\r\n")],
    "HTTP: an HTTP/2 preface": lambda: [RawHttp(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")],
    "HTTP: a TLS hello": lambda: [RawHttp(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 507)],
}
LARGE: dict[str, Callable[[], list[Call]]] = {
    "HTTP: 200,000 headers": lambda: call(_length(), *["x: y"] * 200_000),
    "HTTP: a header of 16 MB": lambda: call(_length(), "x: " + "y" * (16 * MB)),
    "HTTP: a path of 16 MB": lambda: [RawHttp(b"GET /" + b"a" * (16 * MB) + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")],
    "HTTP: 16 MB of empty lines before a call": lambda: [RawHttp(b"\r\n" * (8 * MB) + HIDDEN)],
    "HTTP: a chunk's extension of 16 MB": lambda: chunked(b"1;" + b"x" * (16 * MB) + b"\r\na\r\n0\r\n\r\n"),
    "HTTP: 1,000,000 chunks of a byte": lambda: chunked(chunks(*[b" "] * MB) + chunks(BODY) + b"0\r\n\r\n"),
    "HTTP: trailers of 16 MB": lambda: chunked(chunks(BODY) + b"0\r\nx: " + b"y" * (16 * MB) + b"\r\n\r\n"),
    "HTTP: 1,000,000 trailers": lambda: chunked(chunks(BODY) + b"0\r\n" + b"x: y\r\n" * MB + b"\r\n"),
    "HTTP: trailers that name headers": lambda: chunked(
        chunks(BODY) + b"0\r\nauthorization: Bearer x\r\ncontent-length: 5\r\nhost: example.com\r\n\r\n" + HIDDEN
    ),
    "HTTP: 20,000 calls in a pipeline": lambda: [RawHttp(HIDDEN * 20_000)],
    "HTTP: 20,000 calls in a pipeline, no answer read": lambda: [RawHttp(HIDDEN * 20_000, reads=False)],
    "HTTP: 100 bodies announced and none sent": lambda: call(_length(), "expect: 100-continue", body=b"") * 100,
    "HTTP: 1,000 connections without a call": lambda: [RawHttp(b"GET / HT")] * 1_000,
    "HTTP: a query of 50,000 parameters": lambda: [
        RawHttp(b"GET /v1/models?" + b"a=b&" * 15_000 + b" HTTP/1.1\r\nhost: localhost\r\n\r\n")
    ],
}
RAW_HTTP = {**SMUGGLING, **LARGE}
