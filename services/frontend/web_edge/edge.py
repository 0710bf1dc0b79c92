"""HTTP edge for browsers: dispatches a POST to a method of InferenceService."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.services.frontend.access.access import API_KEY, AUTHORIZATION, Access
from quire.services.frontend.bounds.bodies.content_coding import encodings_of
from quire.services.frontend.calls.admission import CallAdmission
from quire.services.frontend.grpc_edge.errors import RefusalRecorder
from quire.services.frontend.http.disconnect import while_connected
from quire.services.frontend.http.headers import Headers, values_of
from quire.services.frontend.http.middleware.decoded_body import FIELD_BYTES, BodyDecoders, DecodedBytes
from quire.services.frontend.http.middleware.options import OPTIONS, no_content
from quire.services.frontend.http.middleware.page_rules import PageRules
from quire.services.frontend.web_edge.answer import WebAnswer
from quire.services.frontend.web_edge.call_status import OK, status_for
from quire.services.frontend.web_edge.codec import Codec
from quire.services.frontend.web_edge.context import CallEnded, WebContext
from quire.services.frontend.web_edge.framing import KINDS, CallKind, Protocol, decode_message
from quire.shared.errors import InvalidArgument, QuireError, ResourceExhausted
from quire.shared.pb.inference.v1 import inference_pb2 as pb
from quire.shared.pb.inference.v1.inference_pb2_grpc import InferenceServiceServicer

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"]
PREFIX = f"/{SERVICE.full_name}/"
# not subject to admission
UNADMITTED_METHODS = ("Attach", "Cancel", "Tokenize", "Detokenize", "ListModels", "GetModel")

UNSUPPORTED_CONTENT_TYPE = Response(status_code=415, headers={"accept-post": ", ".join(KINDS)})


class _Method(NamedTuple):
    """Method of InferenceService with its path's name, request type, kind of response, and implementation."""

    name: str
    request: type[Message]
    streams: bool
    behaviour: Callable[[Any, Any], Awaitable[Any]]


class WebEdge:
    """Handler of InferenceService calls; all other requests are passed to `app`."""

    def __init__(
        self,
        app: ASGIApp,
        service: InferenceServiceServicer,
        codec: Codec,
        *,
        access: Access,
        rules: PageRules,
        admission: CallAdmission,
        refused: RefusalRecorder,
        decoders: BodyDecoders,
        max_bytes: int,
    ) -> None:
        """Builds the table of methods from the service; bodies of more than `max_bytes` bytes are refused."""
        self._app = app
        self._codec = codec
        self._access = access
        self._rules = rules
        self._admission = admission
        self._refused = refused
        self._decoders = decoders
        self._max_bytes = max_bytes
        self._methods = {
            PREFIX + method.name: _Method(
                method.name,
                GetMessageClass(method.input_type),
                method.server_streaming,
                getattr(service, method.name),
            )
            for method in SERVICE.methods
            if not method.client_streaming  # browsers send one message
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers POSTs to a method's path in the protocol of their content type, and OPTIONS with the allowed
        methods; passes all else to the wrapped application. An unknown content type gives 415, but a missing key is
        refused first."""
        method = self._methods.get(scope["path"]) if scope["type"] == "http" else None
        if method is not None and scope["method"] == OPTIONS:
            await no_content(f"{OPTIONS}, POST")(scope, receive, send)
            return
        if method is None or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        metadata = _metadata(scope["headers"])
        kind = KINDS.get(metadata.get("content-type", "").partition(";")[0].replace(" ", "").lower())
        if kind is not None and _fits(kind, method):
            await self._answer(method, kind, scope, receive, send)
        elif self._access.rejection(dict(metadata)) is None:
            await UNSUPPORTED_CONTENT_TYPE(scope, receive, send)
        else:
            await self._app(scope, receive, send)  # which answers that a key is needed

    async def _answer(self, method: _Method, kind: CallKind, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a call. Errors before the method begins are counted and logged here, all others by the method."""
        answer, metadata = WebAnswer(kind, send), _metadata(scope["headers"])
        try:
            self._rules.check("POST", "", scope["headers"], scope["http_version"])
            self._check(method, metadata)
            with self._decoders.held() as decoded_bytes:
                data = await self._message(kind, scope["headers"], metadata, receive, decoded_bytes)
                message = await self._codec.parse(data, method.request, is_json=kind.is_json)
                del data
            context = WebContext(metadata, answer.write, ":".join(map(str, scope.get("client") or ())))
        except QuireError as error:
            self._refused(PREFIX + method.name, error)
            await answer.end(status_for(error), {})
            return
        async with while_connected(receive):
            ending = OK
            try:
                answered = await method.behaviour(message, context)
                if answered is not None:
                    await answer.write(answered)
            except CallEnded as ended:
                ending = ended.ending
            await answer.end(ending, context.trailers)

    def _check(self, method: _Method, metadata: dict[str, str]) -> None:
        """Raises the error of a missing key or a full server before a byte of the body is read."""
        error = self._access.rejection(dict(metadata))
        if error is not None:
            raise error
        if method.name not in UNADMITTED_METHODS:
            self._admission.check_open(0, self._access.tenant_from_metadata(dict(metadata)))

    async def _message(
        self, kind: CallKind, headers: Headers, metadata: dict[str, str], receive: Receive, decoded_bytes: DecodedBytes
    ) -> bytes:
        """Returns the call's message, decoded if the body or the message within is compressed."""
        field = kind.encoding_header
        of_body, of_message = (
            encodings_of(values_of(FIELD_BYTES, headers)),
            encodings_of([metadata.get(field, "")], field),
        )
        if of_body:
            receive = self._decoders.decoded(receive, of_body, self._max_bytes, decoded_bytes)
        sent = decode_message(await self._body(metadata, receive), kind)
        if not sent.is_compressed:
            return sent.data
        if not of_message:
            raise InvalidArgument(f"the message is marked as compressed, but {field} names no encoding", field=field)
        return await self._decoders.decode(sent.data, of_message, self._max_bytes, decoded_bytes)

    async def _body(self, metadata: dict[str, str], receive: Receive) -> bytes:
        """Reads the complete body. Raises InvalidArgument if the client disconnects, and checks the length before
        and while it reads."""
        self._check_length(int(metadata.get("content-length", "0")))
        parts: list[bytes] = []
        num_bytes, has_more = 0, True
        while has_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise InvalidArgument("the body ended before the message was complete", field="message")
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            self._check_length(num_bytes)
            has_more = message.get("more_body", False)
        return b"".join(parts)

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ResourceExhausted(f"the body has more than {self._max_bytes} bytes")


def _metadata(headers: Headers) -> dict[str, str]:
    """Returns the headers as a dictionary; duplicate keys are dropped, as on the other edges."""
    metadata: dict[str, str] = {}
    for name, value in headers:
        is_duplicate = name in (AUTHORIZATION, API_KEY) and name.decode() in metadata
        metadata[name.decode("latin-1")] = "" if is_duplicate else value.decode("latin-1")
    return metadata


def _fits(kind: CallKind, method: _Method) -> bool:
    """Returns whether the protocol fits the method; gRPC-Web frames all answers alike."""
    return kind.is_grpc_web or (kind.protocol is Protocol.CONNECT_STREAM) == method.streams
