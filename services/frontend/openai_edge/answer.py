"""Runs a generation for an HTTP client and writes the answer, in one piece or as server-sent events."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from services.frontend.generation import Generation
from services.frontend.generator import Generator
from services.frontend.openai_edge import errors
from services.frontend.openai_edge.disconnect import while_connected
from services.frontend.openai_edge.format import Format
from services.frontend.openai_edge.headers import request_id_header
from services.frontend.openai_edge.requests import AnswerOptions
from services.frontend.request import Request
from shared.errors import QuireError

DONE = b"data: [DONE]\n\n"


def event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"


class Answer(Response):
    """The work happens while the response is sent, so that one place sees the client go and every error.

    Headers wait for the first tokens: until then a failure still gets its own status.
    """

    def __init__(self, generator: Generator, request: Request, options: AnswerOptions, format: Format) -> None:
        kind = "text/event-stream" if options.stream else "application/json"
        super().__init__(
            media_type=kind, headers={"cache-control": "no-cache", **request_id_header(request.request_id)}
        )
        del self.headers["content-length"]
        self._generator = generator
        self._request = request
        self._options = options
        self._format = format

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with while_connected(receive):
            try:
                generation = await self._generator.start(self._request)
                try:
                    await (self._stream(generation, send) if self._options.stream else self._whole(generation, send))
                finally:
                    generation.close()
            except QuireError as error:
                response = errors.as_response(error)
                response.headers.update(request_id_header(self._request.request_id))
                await response(scope, receive, send)

    async def _whole(self, generation: Generation, send: Send) -> None:
        deltas = await generation.collect()
        body = orjson.dumps(self._format.whole(deltas, generation))
        self.headers["content-length"] = str(len(body))
        await self._open(send)
        await send({"type": "http.response.body", "body": body})

    async def _stream(self, generation: Generation, send: Send) -> None:
        """One write for everything that is ready; while it is under way, the next news gather."""
        is_open = False
        try:
            async for deltas in generation:
                if not is_open:
                    await self._open(send)
                    is_open = True
                chunks = [event(c) for delta in deltas for c in self._format.chunks(delta, generation)]
                await send({"type": "http.response.body", "body": b"".join(chunks), "more_body": True})
            last = event(self._format.usage_chunk(generation.usage)) if self._options.include_usage else b""
        except QuireError as error:
            if not is_open:
                raise
            last = event(errors.as_object(error))
        await send({"type": "http.response.body", "body": last + DONE})

    async def _open(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
