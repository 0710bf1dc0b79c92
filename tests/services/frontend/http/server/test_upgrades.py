"""Requests that offer a protocol upgrade are served over HTTP/1.1, on a reusable connection.

Inputs: langchain4j#3682, vllm#57203, uvicorn#2722 (Java's HttpClient offers h2c with every request).
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.services.frontend.http.server.upgrades import without_upgrade
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ScriptedScheduler, count_up, scheduler
from tests.services.frontend.tool_model import tool_model_folder

SAID = [{"role": "user", "content": "hi"}]
BODIES = {
    "/v1/chat/completions": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/v1/messages": {"model": "talking", "messages": SAID, "max_tokens": 3},
    "/api/chat": {"model": "talking", "messages": SAID, "stream": False, "options": {"num_predict": 3}},
}
JAVA = "Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA\r\nUpgrade: h2c"
OFFERS = {
    "h2c": JAVA,
    "websocket": "Upgrade: websocket\r\nConnection: upgrade, keep-alive",
    "tls": "Connection: Upgrade\r\nUpgrade: TLS/1.2, HTTP/1.1",
    "no offer": "Connection: upgrade",  # nginx with `Connection "upgrade"` (open-webui#8074, invidious#604)
    "empty": "Connection: Upgrade\r\nUpgrade:",
    "twice": "Connection: upgrade\r\nUpgrade: h2c\r\nUpgrade: websocket\r\nConnection: Upgrade",
}
JAVA_SOURCE = """
import java.net.URI;
import java.net.http.*;
public class Client {
    public static void main(String[] args) throws Exception {
        HttpClient client = HttpClient.newHttpClient();
        for (int number = 0; number < 2; number++) {
            HttpRequest request = HttpRequest.newBuilder(URI.create(args[0]))
                .header("Content-Type", "application/json")
                .POST(HttpRequest.BodyPublishers.ofString(args[1])).build();
            HttpResponse<String> answer = client.send(request, HttpResponse.BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.version());
        }
    }
}
"""


@pytest.fixture
async def frontend(tmp_path: Path) -> AsyncIterator[Running]:
    script = ScriptedScheduler(count_up)
    async with scheduler(script), running(tool_model_folder(tmp_path / "talking"), script.address) as frontend:
        yield frontend


class Client:
    """One connection; reads answers with a content length."""

    def __init__(self, frontend: Running) -> None:
        self._host, _, self._port = frontend.frontend.http_address.rpartition(":")

    async def __aenter__(self) -> Client:
        self.reader, self.writer = await asyncio.open_connection(self._host, int(self._port))
        return self

    async def __aexit__(self, *_: object) -> None:
        self.writer.close()

    async def send(self, *packets: bytes) -> None:
        """Sends the pieces, waiting until each has been written."""
        for packet in packets:
            self.writer.write(packet)
            await self.writer.drain()
            await asyncio.sleep(0.01)

    async def answer(self) -> tuple[int, bytes]:
        async with asyncio.timeout(60):
            head = await self.reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            return int(head.split()[1]), await self.reader.readexactly(int(length.partition(b":")[2]))


def head(path: str, offer: str, framing: str) -> bytes:
    line = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
    return f"{line}{offer}\r\nContent-Type: application/json\r\n{framing}\r\n\r\n".encode()


def chunked(body: bytes) -> bytes:
    middle = len(body) // 2
    pieces = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in (body[:middle], body[middle:], b"")]
    return b"".join(pieces)


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("offer", OFFERS)
async def test_an_offer_is_ignored_and_the_connection_lives(frontend: Running, path: str, offer: str) -> None:
    body = json.dumps(BODIES[path]).encode()
    sized = head(path, OFFERS[offer], f"Content-Length: {len(body)}")
    in_chunks = head(path, OFFERS[offer], "Transfer-Encoding: chunked")
    plain = head(path, "Accept: */*", f"Content-Length: {len(body)}")
    async with Client(frontend) as client:
        for packets in (
            [sized + body],
            [sized, body],
            [sized[:40], sized[40:90], sized[90:] + body[:5], body[5:]],
            [in_chunks + chunked(body)],
            [in_chunks, chunked(body)],
            [plain + body],
        ):
            await client.send(*packets)
            status, answered = await client.answer()
            assert (status, b'"error"' in answered) == (200, False), answered


async def test_pipelined_requests_with_offers_are_answered_in_order(frontend: Running) -> None:
    bodies = [json.dumps({**BODIES["/v1/messages"], "max_tokens": count}).encode() for count in (1, 2, 3)]
    sent = [head("/v1/messages", JAVA, f"Content-Length: {len(body)}") + body for body in bodies]
    async with Client(frontend) as client:
        await client.send(b"".join(sent))
        answers = [json.loads((await client.answer())[1]) for _ in bodies]
    assert [answer["usage"]["output_tokens"] for answer in answers] == [1, 2, 3]


async def test_a_request_without_a_body_may_offer_as_well(frontend: Running) -> None:
    async with Client(frontend) as client:
        for _ in range(2):
            await client.send(f"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n{JAVA}\r\n\r\n".encode())
            status, answered = await client.answer()
            assert status == 200
            assert json.loads(answered)["data"]


async def test_an_offer_hides_no_second_request(frontend: Running) -> None:
    """The end of the body is determined once, with all headers."""
    for framing in ("Content-Length: 5\r\nTransfer-Encoding: chunked", "Content-Length: 5\r\nContent-Length: 6"):
        async with Client(frontend) as client:
            await client.send(
                head("/v1/messages", JAVA, framing) + b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"
            )
            async with asyncio.timeout(60):
                answered = await client.reader.read()
            assert answered.startswith(b"HTTP/1.1 400 ")
            assert answered.count(b"HTTP/1.1 ") == 1


async def test_a_tunnel_is_refused(frontend: Running) -> None:
    for target in ("example.com:443", "/v1/models"):
        async with Client(frontend) as client:
            await client.send(f"CONNECT {target} HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n\r\n".encode())
            async with asyncio.timeout(60):
                answered = await client.reader.read()
            assert answered.startswith(b"HTTP/1.1 501 ")
            assert answered.count(b"HTTP/1.1 ") == 1


def test_other_options_of_the_connection_are_kept() -> None:
    headers = [(b"host", b"x"), (b"connection", b"close, Upgrade,HTTP2-Settings"), (b"upgrade", b"h2c")]
    written = without_upgrade(b"POST", b"/a?b", "1.0", headers)
    assert written == b"POST /a?b HTTP/1.0\r\nhost: x\r\nconnection: close\r\n\r\n"


@pytest.mark.skipif(not (shutil.which("javac") and shutil.which("java")), reason="there is no Java")
async def test_the_client_of_the_java_library_gets_its_answers(frontend: Running, tmp_path: Path) -> None:
    (tmp_path / "Client.java").write_text(JAVA_SOURCE)
    await output("javac", "-d", str(tmp_path), str(tmp_path / "Client.java"))
    path = "/v1/chat/completions"
    said = await output("java", "-cp", str(tmp_path), "Client", frontend.url + path, json.dumps(BODIES[path]))
    assert said.split("\n")[:2] == ["200 HTTP_1_1"] * 2


@pytest.mark.skipif(not shutil.which("curl"), reason="there is no curl")
async def test_curl_that_offers_http_2_gets_its_answer(frontend: Running) -> None:
    path = "/v1/chat/completions"
    sent = ["-H", "Content-Type: application/json", "-d", json.dumps(BODIES[path])]
    once = ["-sS", "--http2", "-o", "/dev/null", "-w", "%{http_code} %{num_connects};", *sent, frontend.url + path]
    assert await output("curl", *once, "--next", *once) == "200 1;200 0;"


async def output(*command: str) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    said, _ = await process.communicate()
    assert process.returncode == 0
    return said.decode()
