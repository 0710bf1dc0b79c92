"""Tests of Connect and gRPC-Web streams, read by fetch in a page of another origin."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from quire.services.frontend.web_edge.framing import frame
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from tests.services.frontend.console.browser import CHROMIUM, Browser, browsing
from tests.services.frontend.running import running
from tests.services.frontend.scripted_replies import replying
from tests.services.frontend.scripted_scheduler import CANCELLED, ScriptedScheduler, scheduler
from tests.services.frontend.tool_model import tool_model_folder

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")

GENERATE = "/quire.inference.v1.InferenceService/Generate"
REPLY = "It is sunny."
KEY = "the-key-of-a-page"
ASK = frame(0, pb.GenerateRequest(text="Hm?").SerializeToString())
ASK_IN_JSON = frame(0, b'{"text": "Hm?"}')
# Protocols: content type, additional headers of its clients, the request, and the flags of its last frame.
PROTOCOLS: dict[str, tuple[str, dict[str, str], bytes, int]] = {
    "Connect": ("application/connect+proto", {"connect-protocol-version": "1"}, ASK, 0x02),
    "Connect in JSON": ("application/connect+json", {"connect-protocol-version": "1"}, ASK_IN_JSON, 0x02),
    "gRPC-Web": ("application/grpc-web+proto", {"x-grpc-web": "1", "x-user-agent": "page"}, ASK, 0x80),
}


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        """Suppresses the log on stderr."""


@contextmanager
def another_origin() -> Iterator[str]:
    """Yields the origin that serves page.html."""
    handler = partial(QuietHandler, directory=str(Path(__file__).parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


class PausingModel:
    """Scripted model that replies with a text and pauses after the first token of each answer."""

    def __init__(self, folder: Path) -> None:
        self._model = replying(folder, REPLY)
        self.script = ScriptedScheduler(self._next_token, max_model_len=4096)

    def _next_token(self, sequence: Any) -> int:
        if sequence.num_outputs == 0:
            self.script.pause()
        return self._model(sequence)


class Page:
    """Page in the browser; commands run in a thread."""

    def __init__(self, browser: Browser, url: str) -> None:
        self._browser = browser
        self._url = url

    async def call(self, name: str) -> None:
        kind, more, body, _ = PROTOCOLS[name]
        headers = {"content-type": kind, "authorization": f"Bearer {KEY}", **more}
        given = ", ".join(map(json.dumps, (name, self._url + GENERATE, headers, base64.b64encode(body).decode())))
        await self._do(self._browser.evaluate, f"void call({given})")

    async def until(self, name: str, holds: str) -> dict[str, Any]:
        """Waits until `holds` is true for the page's call, and returns the call's state."""
        found = f"((told) => {holds} ? told : null)(calls[{json.dumps(name)}])"
        told: dict[str, Any] = await self._do(self._browser.wait, found)
        return told

    async def abort(self, name: str) -> None:
        await self._do(self._browser.evaluate, f"calls[{json.dumps(name)}].abort()")

    @staticmethod
    async def _do(command: Any, expression: str) -> Any:
        return await asyncio.to_thread(command, expression)


@asynccontextmanager
async def opened(folder: Path, *, is_ours: bool = True) -> AsyncIterator[tuple[Page, ScriptedScheduler]]:
    """Opens the page; `is_ours`: whether the page's origin may call."""
    script = PausingModel(folder).script
    with another_origin() as origin:
        settings: dict[str, Any] = {"cors_origins": (origin if is_ours else "https://page.example",), "api_key": KEY}
        async with scheduler(script), running(folder, script.address, until_health=(), **settings) as frontend:
            await frontend.until_sessions(1)
            with browsing() as browser:
                await asyncio.to_thread(browser.open, f"{origin}/page.html")
                yield Page(browser, frontend.url), script


def text_of(frames: list[tuple[int, str]], *, in_json: bool) -> str:
    messages = [base64.b64decode(data) for _, data in frames]
    if in_json:
        return "".join(json.loads(message).get("text", "") for message in messages)
    return "".join(pb.GenerateResponse.FromString(message).text for message in messages)


async def test_a_page_of_another_origin_reads_and_aborts_streams_token_by_token(tmp_path: Path) -> None:
    async with opened(tool_model_folder(tmp_path / "talking")) as (page, script):
        for name, (kind, _, _, last) in PROTOCOLS.items():
            in_json = kind.endswith("json")
            await page.call(name)
            first = await page.until(name, "told.frames.length > 0")
            begun = text_of(first["frames"], in_json=in_json)
            assert (first["status"], first["end"]) == (200, None)
            assert REPLY.startswith(begun)
            assert 0 < len(begun) < len(REPLY), "it reads while the rest has not been said"
            script.resume()
            whole = await page.until(name, "told.end")
            *messages, [flags, _] = whole["frames"]
            assert (whole["end"], flags) == ("ended", last), name
            assert text_of(messages, in_json=in_json) == REPLY, name
        assert script.cancellations == []
        for name in PROTOCOLS:
            script.cancellations.clear()
            await page.call(name)
            await page.until(name, "told.frames.length > 0")
            await page.abort(name)
            assert (await page.until(name, "told.end"))["end"] == "AbortError"
            await script.until(lambda: script.cancellations)
            [(ids, reason)] = script.cancellations
            assert (len(ids), reason) == (1, CANCELLED), name
            script.resume()
        await script.until(lambda: script.num_running == 0)


async def test_pages_of_unknown_origins_are_refused(tmp_path: Path) -> None:
    async with opened(tool_model_folder(tmp_path / "talking"), is_ours=False) as (page, script):
        for name in PROTOCOLS:
            await page.call(name)
            told = await page.until(name, "told.end")
            assert (told["end"], told["status"], told["frames"]) == ("TypeError", 0, [])
        assert script.submissions == [], "the browser asked before it sent the call"
