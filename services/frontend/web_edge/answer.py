"""Encoding of messages and the end of a call in the call's protocol."""

from __future__ import annotations

from google.protobuf.message import Message
from grpc import StatusCode
from starlette.types import Send

from quire.services.frontend.web_edge import codec
from quire.services.frontend.web_edge.call_status import WebCallStatus
from quire.services.frontend.web_edge.framing import CONNECT_END, GRPC_WEB_TRAILERS, CallKind, encode_body, frame

JSON = "application/json"


class WebAnswer:
    """Answer to one call. A unary Connect call sends its headers only at its end."""

    def __init__(self, kind: CallKind, send: Send) -> None:
        self._kind = kind
        self._send = send
        self._is_open = False
        self._message = b""  # of a unary Connect call

    async def write(self, message: Message) -> None:
        """Sends a message at once as a frame, with headers before the first one. Unary Connect keeps it until `end`."""
        data = codec.serialize(message, is_json=self._kind.is_json)
        if not self._kind.is_framed:
            self._message = data
            return
        await self._open(200, self._kind.content_type)
        await self._body(encode_body(frame(0, data), self._kind), more=True)

    async def end(self, ending: WebCallStatus, trailers: dict[str, str]) -> None:
        """Ends the call: as trailers in a last frame for gRPC-Web, as an end message for Connect streams, as the
        HTTP response for unary Connect."""
        if not self._kind.is_framed:
            await self._end_unary(ending, trailers)
            return
        await self._open(200, self._kind.content_type)
        if self._kind.is_grpc_web:
            last = frame(GRPC_WEB_TRAILERS, ending.as_trailers(trailers))
        else:
            last = frame(CONNECT_END, ending.as_last_message(trailers))
        await self._body(encode_body(last, self._kind))

    async def _end_unary(self, ending: WebCallStatus, trailers: dict[str, str]) -> None:
        """Sends the kept message with trailers as `trailer-` headers, or the error as JSON with its HTTP status."""
        if ending.code is StatusCode.OK:
            more = {f"trailer-{name}": value for name, value in trailers.items()}
            await self._open(200, self._kind.content_type, more)
            await self._body(self._message)
        else:
            await self._open(ending.http_status, JSON)
            await self._body(ending.as_json())

    async def _open(self, status: int, content_type: str, more: dict[str, str] | None = None) -> None:
        """Sends status and headers, with `more` in addition; does nothing if they have been sent."""
        if self._is_open:
            return
        self._is_open = True
        headers = {"content-type": content_type, "cache-control": "no-cache", **(more or {})}
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _body(self, data: bytes, *, more: bool = False) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
