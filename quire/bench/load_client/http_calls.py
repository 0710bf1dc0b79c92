"""Load client for the OpenAI API of any server: streamed completions, or chats with pictures, over raw sockets.

An HTTP library would cost more than what is measured. Bytes are stored with their arrival times and parsed after the
load.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

from quire.bench.load_client.timing import Received, RequestTiming
from quire.bench.workload.images import NO_IMAGES, ImageOptions, chat_messages
from quire.bench.workload.workloads import BenchRequest
from quire.shared.errors import FailedPrecondition

DATA = b"data: "
DONE = b"[DONE]"


class HttpCaller:
    """Sends completions requests, or chats if requests have pictures. `base_url`: http(s)://HOST:PORT, with or without
    /v1."""

    def __init__(self, base_url: str, model: str, temperature: float, images: ImageOptions = NO_IMAGES) -> None:
        url = urlsplit(root_of(base_url))
        self._host = url.hostname or ""
        self._port = url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        path = f"{url.path}/v1/chat/completions" if images.count else f"{url.path}/v1/completions"
        self._head = f"POST {path} HTTP/1.1\r\nHost: {url.netloc}\r\nConnection: close\r\n"
        self._images = images
        self._model = model
        self._temperature = temperature

    async def open(self) -> None:
        """Prepares nothing: every request has a connection of its own."""

    def body(self, item: BenchRequest) -> bytes:
        """Returns the complete HTTP request of a workload's item, with a fixed number of output tokens."""
        body = {
            "model": item.adapter or self._model,
            **({"messages": chat_messages(item, self._images)} if self._images.count else {"prompt": item.prompt}),
            "max_tokens": item.num_output,
            "temperature": self._temperature,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        content = json.dumps(body).encode()
        head = f"{self._head}Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
        return head.encode() + content

    async def call(self, body: bytes) -> tuple[RequestTiming, Received]:
        """Sends a request on a new connection and stores the answer with arrival times, unparsed. Connection errors
        are stored in the timing and not raised."""
        timing = RequestTiming(time.monotonic())
        answer = _Answer()
        try:
            loop = asyncio.get_running_loop()
            transport, _ = await loop.create_connection(lambda: answer, self._host, self._port, ssl=self._tls)
            transport.write(body)
            await answer.ended
        except OSError as error:
            timing.error = repr(error)
        timing.ended = answer.received[-1][0] if answer.received else time.monotonic()
        return timing, answer.received

    def settle(self, timing: RequestTiming, received: Received) -> None:
        """Parses the stored answer and adds arrival times, the token count (from usage, else one per event) and
        errors to the timing."""
        if timing.error:
            return
        if not received or received[0][1].split(None, 2)[1:2] != [b"200"]:
            timing.error = b"".join(part for _, part in received)[:300].decode(errors="replace") or "no answer"
            return
        usage = 0
        for at, payload in events(received):
            event = json.loads(payload)
            if any(_text(choice) for choice in event.get("choices", ())):
                timing.arrivals.append(at)
            usage = (event.get("usage") or {}).get("completion_tokens", usage)
            if "error" in event:
                timing.error = str(event["error"])[:300]
        timing.num_tokens = usage or len(timing.arrivals)

    async def close(self) -> None:
        pass


def _text(choice: dict[str, Any]) -> str | None:
    """Returns the text of a choice of a completion, or of a chat's chunk."""
    text: str | None = choice.get("text") or (choice.get("delta") or {}).get("content")
    return text


class _Answer(asyncio.Protocol):
    """Collects everything until the server closes the connection."""

    def __init__(self) -> None:
        self.received: Received = []
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        self.received.append((time.monotonic(), data))

    def connection_lost(self, exc: Exception | None) -> None:
        """Completes `ended`, with the connection's error if there is one."""
        if self.ended.done():
            return
        if exc is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(exc)


def events(received: Received) -> Iterator[tuple[float, bytes]]:
    """Returns the payloads of server-sent events with the arrival time of the last byte of each."""
    body, pending = _Body(), b""
    for at, part in received:
        *lines, pending = (pending + body.feed(part)).split(b"\n")
        for line in lines:
            if line.startswith(DATA) and not line.startswith(DATA + DONE):
                yield at, line[len(DATA) :]


class _Body:
    """Extracts a response body from the received bytes: without headers and chunk framing."""

    def __init__(self) -> None:
        self._pending = b""
        self._left = 0  # remaining bytes of the current chunk
        self._step: Callable[[], bytes | None] = self._head

    def feed(self, part: bytes) -> bytes:
        """Returns the decoded body bytes that the part completes; the rest is kept."""
        self._pending += part
        pieces = []
        while (piece := self._step()) is not None:
            pieces.append(piece)
        return b"".join(pieces)

    def _head(self) -> bytes | None:
        """Consumes the header, once complete, and chooses the next step by its transfer encoding. Steps return None
        if they need more bytes."""
        head, end, rest = self._pending.partition(b"\r\n\r\n")
        if not end:
            return None
        self._pending = rest
        self._step = self._size if b"transfer-encoding: chunked" in head.lower() else self._all
        return b""

    def _all(self) -> bytes | None:
        taken, self._pending = self._pending, b""
        return taken or None

    def _size(self) -> bytes | None:
        """Consumes a chunk's size line; a size of 0 ends the body."""
        size, end, rest = self._pending.partition(b"\r\n")
        if not end:
            return None
        self._left, self._pending = int(size.split(b";")[0], 16), rest
        self._step = self._content if self._left else self._nothing
        return b""

    def _content(self) -> bytes | None:
        """Consumes the bytes of the current chunk that have arrived."""
        taken, self._pending = self._pending[: self._left], self._pending[self._left :]
        self._left -= len(taken)
        if self._left == 0:
            self._step = self._end_of_chunk
            return taken
        return taken or None

    def _end_of_chunk(self) -> bytes | None:
        """Consumes the line break after a chunk."""
        if len(self._pending) < 2:
            return None
        self._pending = self._pending[2:]
        self._step = self._size
        return b""

    def _nothing(self) -> bytes | None:
        return None


def root_of(base_url: str) -> str:
    """Returns a URL without a trailing slash or /v1."""
    base_url = base_url if "://" in base_url else f"http://{base_url}"
    return base_url.rstrip("/").removesuffix("/v1")


def served_model(base_url: str) -> str:
    """Returns the first model name that the server lists."""
    with urllib.request.urlopen(f"{root_of(base_url)}/v1/models", timeout=10) as response:
        return str(json.load(response)["data"][0]["id"])


def reset_prefix_cache(base_url: str) -> None:
    """Resets the prefix cache through vLLM's endpoint; raises FailedPrecondition if the server refuses."""
    request = urllib.request.Request(f"{root_of(base_url)}/reset_prefix_cache", method="POST")
    try:
        urllib.request.urlopen(request, timeout=10).close()
    except urllib.error.HTTPError as error:
        raise FailedPrecondition(
            f"reset_prefix_cache: {base_url} did not reset its prefix cache ({error}); start that server with "
            "VLLM_SERVER_DEV_MODE=1, or measure with --no-reset-prefix-cache",
            field="reset_prefix_cache",
        ) from None
