"""Responses of resumable streams: server-sent events with ids from an offset on, or only a confirmation of the
start."""

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
KEEP_ALIVE = b": keep-alive\n"  # a comment line, not an event: it must not reset the last event id
NO_CONTENT = 204  # stops a browser's EventSource from reconnecting


class EventMessageWriter:
    """A MessageWriter of resumable streams whose messages are a format's server-sent events."""

    def __init__(self, format: ResponseFormatter) -> None:
        self._format = format

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        return _split(self._format.events(deltas, generation))

    def final_messages(self, generation: Generation) -> list[bytes]:
        return _split(self._format.last_events(generation))

    def error_messages(self, error: QuireError) -> list[bytes]:
        return _split(self._format.error_events(error))


def _split(events: bytes) -> list[bytes]:
    """Splits the output into events; none contains an empty line, since their data is JSON."""
    return [event + END for event in events.split(END) if event]


class StreamStartedResponse(DeferredResponse):
    """Confirms in one piece that a stream was started; the stream continues by itself."""

    def __init__(
        self,
        begin: Callable[[Call], Awaitable[Stream]],
        confirmation: Mapping[str, Any],
        error_writer: ErrorWriter,
        structured_output_field: str,
    ) -> None:
        """Prepares the response. `begin`: starts the stream; raises QuireError. `confirmation`: the body, as JSON."""
        super().__init__("application/json", error_writer, structured_output_field)
        self._begin = begin
        self._confirmation = confirmation

    async def respond(self, call: Call, send: Send) -> None:
        """Starts the stream, then sends the confirmation."""
        await self._begin(call)
        body = orjson.dumps(self._confirmation)
        self.headers["content-length"] = str(len(body))
        await self._open(send)
        await send({"type": "http.response.body", "body": body})


class StreamResponse(DeferredResponse):
    """Sends a stream from an offset on; the client may disconnect and attach again."""

    def __init__(
        self,
        streams: Streams,
        find: Callable[[Call], Awaitable[Stream]],
        offset: int,
        error_writer: ErrorWriter,
        structured_output_field: str,
    ) -> None:
        """Prepares the response. `find`: starts or finds the stream; raises QuireError."""
        super().__init__(EVENTS, error_writer, structured_output_field, lambda: KEEP_ALIVE)
        self._streams = streams
        self._find = find
        self._offset = offset

    async def respond(self, call: Call, send: Send) -> None:
        """Sends the stream from the offset on as server-sent events; 204 if nothing is left of it."""
        stream = await self._find(call)
        with self._streams.reading(stream):
            async for piece in stream.read(self._offset):
                await self._send_piece(transcoding.server_sent_event(stream, piece), send)
        if self._is_open:
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.start", "status": NO_CONTENT, "headers": []})
            await send({"type": "http.response.body", "body": b""})
