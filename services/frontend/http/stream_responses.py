"""A resumable stream as server-sent events with ids: as it begins, and as it is taken up; or only that it has begun."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from starlette.types import Send

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.http.dialect import EVENTS
from quire.services.frontend.http.responses import DeferredResponse, ErrorWriter, ResponseFormatter
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.streams import transcoding
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.streams import Streams
from quire.shared.errors import QuireError

END = b"\n\n"  # of an event
LINE = b": keep-alive\n"  # no event of its own: readers that keep the last id would take it for one
NO_CONTENT = 204  # tells a browser's EventSource that there is nothing to come back for


class EventMessageWriter:
    """A MessageWriter: each event is a message."""

    def __init__(self, format: ResponseFormatter) -> None:
        self._format = format

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        return _split(self._format.events(deltas, generation))

    def final_messages(self, generation: Generation) -> list[bytes]:
        return _split(self._format.last_events(generation))

    def error_messages(self, error: QuireError) -> list[bytes]:
        return _split(self._format.error_events(error))


def _split(events: bytes) -> list[bytes]:
    """None has an empty line inside: they are JSON."""
    return [event + END for event in events.split(END) if event]


class StreamStartedResponse(DeferredResponse):
    """Says that it has begun, in one piece, and is done: it goes on by itself."""

    def __init__(
        self,
        begin: Callable[[Call], Awaitable[Stream]],
        said: Mapping[str, Any],
        words: ErrorWriter,
        structured_output_field: str,
    ) -> None:
        """`begin` raises QuireError."""
        super().__init__("application/json", words, structured_output_field)
        self._begin = begin
        self._said = said

    async def respond(self, call: Call, send: Send) -> None:
        await self._begin(call)
        body = orjson.dumps(self._said)
        self.headers["content-length"] = str(len(body))
        await self._open(send)
        await send({"type": "http.response.body", "body": body})


class StreamResponse(DeferredResponse):
    """Reads it from an offset on; the client may leave and come back."""

    def __init__(
        self,
        streams: Streams,
        find: Callable[[Call], Awaitable[Stream]],
        offset: int,
        words: ErrorWriter,
        structured_output_field: str,
    ) -> None:
        """`find`: begins it, or finds it; raises QuireError."""
        super().__init__(EVENTS, words, structured_output_field, lambda: LINE)
        self._streams = streams
        self._find = find
        self._offset = offset

    async def respond(self, call: Call, send: Send) -> None:
        stream = await self._find(call)
        with self._streams.reading(stream):
            async for piece in stream.read(self._offset):
                await self._send_piece(transcoding.server_sent_event(stream, piece), send)
        if self._is_open:
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.start", "status": NO_CONTENT, "headers": []})
            await send({"type": "http.response.body", "body": b""})
