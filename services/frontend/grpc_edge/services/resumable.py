"""Resumable streams of Generate and Chat: start, attach, cancel, and restoration of their requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from quire.services.frontend.calls.calls import Call
from quire.services.frontend.generation.generation import Generation
from quire.services.frontend.grpc_edge import requests, responses
from quire.services.frontend.grpc_edge.errors import Context
from quire.services.frontend.grpc_edge.requests import Arrival
from quire.services.frontend.output_processor.delta import SampleDelta
from quire.services.frontend.request.request import Request
from quire.services.frontend.streams import transcoding
from quire.services.frontend.streams.local_stream import RequestRestorer, RestoredRequest
from quire.services.frontend.streams.stream import Stream
from quire.services.frontend.streams.streams import Streams
from quire.services.frontend.streams.transcoding import CHAT, GENERATE
from quire.services.frontend.tokenizer.generation_config import GenerationDefaults
from quire.shared.errors import QuireError
from quire.shared.pb.frontend.v1 import stream_pb2
from quire.shared.pb.inference.v1 import inference_pb2 as pb

RequestMessage = pb.GenerateRequest | pb.ChatRequest
ToMessage = Callable[[str, SampleDelta], responses.Response]


class ResumableMethod(NamedTuple):
    """A method that supports resumable streams: its message, and the conversions to request and response."""

    message_class: type[RequestMessage]
    to_request: Callable[..., Request]
    to_message: ToMessage


KINDS: dict[str, ResumableMethod] = {
    GENERATE: ResumableMethod(pb.GenerateRequest, requests.generate_request, responses.generate_response),
    CHAT: ResumableMethod(pb.ChatRequest, requests.chat_request, responses.chat_response),
}


class ResponseWriter:
    """Writes one response message per delta; also a MessageWriter of resumable streams."""

    def __init__(self, request_id: str, to_message: ToMessage) -> None:
        self._request_id = request_id
        self._to_message = to_message
        self._is_first = True

    def to_message(self, delta: SampleDelta, generation: Generation) -> responses.Response:
        """Returns the response message of a delta; details only for the first, the last, and those with
        log-probabilities."""
        response = self._to_message(self._request_id, delta)
        if self._is_first or delta.finish is not None or delta.logprobs or delta.prompt_logprobs:
            responses.add_details(response, delta, generation, self._is_first)
            self._is_first = False
        return response

    def messages(self, deltas: list[SampleDelta], generation: Generation) -> list[bytes]:
        return [self.to_message(delta, generation).SerializeToString() for delta in deltas]

    def final_messages(self, generation: Generation) -> list[bytes]:
        return []

    def error_messages(self, error: QuireError) -> list[bytes]:
        """Returns no messages: the call's status carries the error."""
        return []


class ResumableCalls:
    """Starts, attaches to and cancels resumable streams over gRPC."""

    def __init__(self, streams: Streams, defaults: GenerationDefaults) -> None:
        self._streams = streams
        self._defaults = defaults
        streams.register_restorers({kind: self._remake(KINDS[kind]) for kind in KINDS})

    def _remake(self, kind: ResumableMethod) -> RequestRestorer:
        """Returns the function that parses a stored request of this method again and prepares its writer."""

        def remake(kept: stream_pb2.KeptRequest) -> RestoredRequest:
            """Parses a stored request again. Raises QuireError, or DecodeError for a message that cannot be read."""
            message = kind.message_class.FromString(kept.body)
            request = kind.to_request(message, requests.detached_arrival(), self._defaults)
            return RestoredRequest(request, ResponseWriter(kept.request_id, kind.to_message))

        return remake

    async def begin(self, kind: str, message: RequestMessage, request: Request, call: Call, context: Context) -> None:
        """Starts a stream, stored under the request id, and sends it to the caller from its first message on. `kind`:
        of the method. Raises QuireError."""
        retention_s = self._streams.policy.retention_for_s(message.retention_s)
        kept = stream_pb2.KeptRequest(
            kind=kind, body=message.SerializeToString(), retention_ms=round(1000 * retention_s)
        )
        writer = ResponseWriter(request.request_id, KINDS[kind].to_message)
        stream = await self._streams.begin(kept, request, writer, call)
        await self._write(stream, 0, context, lambda message: getattr(message, kind))

    async def attach(self, message: pb.AttachRequest, arrival: Arrival, call: Call, context: Context) -> None:
        stream = await self._streams.attach(requests.tenant(message.tenant, arrival, call), message.request_id)
        await self._write(stream, message.offset, context, lambda message: message)

    async def _write(
        self,
        stream: Stream,
        offset: int,
        context: Context,
        wrap: Callable[[pb.AttachResponse], responses.Response | pb.AttachResponse],
    ) -> None:
        """Writes the stream's messages from the offset on. `wrap`: converts an Attach message to that of the method."""
        with self._streams.reading(stream):
            async for piece in stream.read(offset):
                await context.write(wrap(transcoding.attach_response(stream, piece)))

    async def cancel(self, message: pb.CancelRequest, arrival: Arrival, call: Call) -> pb.CancelResponse:
        await self._streams.cancel(requests.tenant(message.tenant, arrival, call), message.request_id)
        return pb.CancelResponse()
