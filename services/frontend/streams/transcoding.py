"""What readers at the other port get: a message of gRPC as an event, an event of HTTP as a message."""

from __future__ import annotations

from google.protobuf.json_format import MessageToJson

from quire.services.frontend.streams.stream import Stream, StreamPiece
from quire.shared.pb.inference.v1 import inference_pb2 as pb

GENERATE, CHAT = "generate", "chat"  # kinds of streams that were begun over gRPC; others are paths of HTTP
TYPE, DATA = "event: ", "data: "  # lines of an event


def attach_response(stream: Stream, piece: StreamPiece) -> pb.AttachResponse:
    """For a reader over gRPC."""
    if stream.kind == GENERATE:
        message = pb.AttachResponse(generate=pb.GenerateResponse.FromString(piece.message))
    elif stream.kind == CHAT:
        message = pb.AttachResponse(chat=pb.ChatResponse.FromString(piece.message))
    else:
        message = pb.AttachResponse(event=_told(piece.message))
    if piece.offset is not None:
        getattr(message, str(message.WhichOneof("message"))).offset = piece.offset
    return message


def server_sent_event(stream: Stream, piece: StreamPiece) -> bytes:
    """For a reader over HTTP."""
    if stream.kind not in (GENERATE, CHAT):
        return piece.message if piece.offset is None else b"id: %d\n%b" % (piece.offset, piece.message)
    written = MessageToJson(attach_response(stream, piece), indent=None).encode()
    number = b"" if piece.offset is None else b"id: %d\n" % piece.offset
    return b"%bdata: %b\n\n" % (number, written)


def _told(message: bytes) -> pb.StreamEvent:
    """Its lines; JSON has no line breaks."""
    found = pb.StreamEvent()
    for line in message.decode().split("\n"):
        if line.startswith(TYPE):
            found.type = line.removeprefix(TYPE)
        elif line.startswith(DATA):
            found.data = line.removeprefix(DATA)
    return found
