"""Frontend of a model that takes pictures, with a scheduler that waits so that submissions can be inspected."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from quire.services.frontend.media.store import MediaStore
from quire.shared.columns import i32
from tests.services.frontend.media.fetching import fetch_pixels
from tests.services.frontend.media.seeing_folder import PLACEHOLDER
from tests.services.frontend.running import Running, running
from tests.services.frontend.scripted_scheduler import ReceivedSubmission, ScriptedScheduler, scheduler

PICTURE = "[picture]"


@dataclass
class Served:
    """Running frontend with its scheduler, which is paused."""

    started: Running
    script: ScriptedScheduler

    @property
    def media_address(self) -> str:
        return self.script.hellos[0].media_address

    @property
    def store(self) -> MediaStore:
        media = self.started.frontend.model.media
        assert media is not None
        return media.store

    def ask(self, path: str, **body: Any) -> asyncio.Future[httpx.Response]:
        """Sends a body; the answer comes when the scheduler resumes, or at once if it is refused."""
        limit = {"max_tokens": 1} if path in ("/v1/chat/completions", "/v1/messages") else {}
        return asyncio.ensure_future(self.started.http.post(path, json={**limit, **body}))

    async def refusal(self, path: str, **body: Any) -> tuple[int, str]:
        """Returns status and text of the error for a body that is refused."""
        asked, number = self.ask(path, **body), len(self.script.submissions)
        waiting = asyncio.ensure_future(self.script.until(lambda: len(self.script.submissions) > number))
        await asyncio.wait({waiting, asked}, return_when=asyncio.FIRST_COMPLETED)
        assert not waiting.done(), f"not refused: {body}"
        waiting.cancel()
        return (await asked).status_code, (await asked).text

    async def submission(
        self, number: int = 0, asked: asyncio.Future[httpx.Response] | None = None
    ) -> ReceivedSubmission:
        """Waits for a submission. `asked`: its request, whose early end is an error."""
        waiting = asyncio.ensure_future(self.script.until(lambda: len(self.script.submissions) > number))
        await asyncio.wait({waiting, *([asked] if asked else [])}, return_when=asyncio.FIRST_COMPLETED)
        if asked is not None and asked.done() and not waiting.done():
            waiting.cancel()
            raise AssertionError((await asked).text)
        await waiting
        return self.script.submissions[number]


@asynccontextmanager
async def seeing_frontend(folder: Path, **settings: Any) -> AsyncIterator[Served]:
    async with scheduler(ScriptedScheduler()) as script, running(folder, script.address, **settings) as started:
        script.pause()
        try:
            yield Served(started, script)
        finally:
            script.resume()


def shown_prompt(served: Served, submission: ReceivedSubmission) -> str:
    """Returns the text of a prompt with [picture] in the places of its items; the items' ranges are checked to hold
    nothing but placeholders."""
    tokenizer = served.started.frontend.model.tokenizer
    ids = i32(submission.token_ids).tolist()
    shown, begin = "", 0
    for item in submission.media:
        assert {tokenizer.token_name(i) for i in ids[item.offset : item.offset + item.length]} == {PLACEHOLDER}
        shown += tokenizer.decode(ids[begin : item.offset], skip_special_tokens=False) + PICTURE
        begin = item.offset + item.length
    return shown + tokenizer.decode(ids[begin:], skip_special_tokens=False)


async def pixels_of(served: Served, submission: ReceivedSubmission) -> list[bytes]:
    """Fetches the pixels of all items of a submission."""
    return [(await fetch_pixels(served.media_address, item.identifier))[1] for item in submission.media]


async def asked_prompt(served: Served, path: str, **body: Any) -> tuple[str, list[bytes]]:
    """Asks, and returns the prompt as shown_prompt() and the first pixel of each picture; the answer must succeed."""
    number = len(served.script.submissions)
    served.script.pause()
    asked = served.ask(path, **body)
    try:
        submission = await served.submission(number, asked)
        shown, colours = shown_prompt(served, submission), [p[:3] for p in await pixels_of(served, submission)]
    finally:
        served.script.resume()
    assert (await asked).status_code == 200, (await asked).text
    return shown, colours


def data_url(content: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(content).decode()}"


def image(content: bytes, **fields: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(content)}, **fields}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def user(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]
