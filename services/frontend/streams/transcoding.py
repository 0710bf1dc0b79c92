"""Converts stream messages for readers of the other port: gRPC messages to server-sent events, and events to
messages."""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson

from quire.services.frontend.streams.stream import Stream, StreamPiece
from quire.shared.pb.inference.v1 import inference_pb2 as pb

GENERATE, CHAT = "generate", "chat"  # kinds of streams started over gRPC; other kinds are HTTP paths
TYPE, DATA = "event: ", "data: "  # field prefixes of a server-sent event


def attach_response(stream: Stream, piece: StreamPiece) -> pb.AttachResponse:
    """Returns the piece as a message of the Attach method: the stored response of a gRPC stream, or an event of an HTTP
    one; with the offset, if it has one."""
    if stream.kind == GENERATE:
        message = pb.AttachResponse(generate=pb.GenerateResponse.FromString(piece.message))
    elif stream.kind == CHAT:
        message = pb.AttachResponse(chat=pb.ChatResponse.FromString(piece.message))
    else:
        message = pb.AttachResponse(event=_parse_event(piece.message))
    if piece.offset is not None:
        getattr(message, str(message.WhichOneof("message"))).offset = piece.offset
    return message


def server_sent_event(stream: Stream, piece: StreamPiece) -> bytes:
    """Returns the piece as a server-sent event, with its offset as the event id."""
    if stream.kind not in (GENERATE, CHAT):
        return piece.message if piece.offset is None else b"id: %d\n%b" % (piece.offset, piece.message)
    written = MessageToJson(attach_response(stream, piece), indent=None).encode()
    number = b"" if piece.offset is None else b"id: %d\n" % piece.offset
    return b"%bdata: %b\n\n" % (number, written)


def _parse_event(message: bytes) -> pb.StreamEvent:
    """Parses one server-sent event; its data is JSON without line breaks."""
    event = pb.StreamEvent()
    for line in message.decode().split("\n"):
        if line.startswith(TYPE):
            event.type = line.removeprefix(TYPE)
        elif line.startswith(DATA):
            event.data = line.removeprefix(DATA)
    return event
