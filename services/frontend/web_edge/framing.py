"""Kinds of calls and framing of their messages (connectrpc.com/docs/protocol, grpc/doc/PROTOCOL-WEB.md)."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from quire.shared.errors import InvalidArgument

PREFIX_BYTES = 5  # flags, and the length as four bytes, big-endian
COMPRESSED, CONNECT_END, GRPC_WEB_TRAILERS = 0x01, 0x02, 0x80
TEXT_SUFFIX = "-text"


class Protocol(Enum):
    """Protocol that a client speaks."""

    CONNECT_UNARY = "application/"
    CONNECT_STREAM = "application/connect+"
    GRPC_WEB = "application/grpc-web"


ENCODING_HEADERS = {Protocol.CONNECT_STREAM: "connect-content-encoding", Protocol.GRPC_WEB: "grpc-encoding"}


@dataclass(frozen=True, slots=True)
class CallKind:
    """Kind of a call by its content type, which is the answer's as well."""

    content_type: str
    protocol: Protocol
    is_json: bool = False
    is_text: bool = False  # the whole body is base64

    @property
    def is_framed(self) -> bool:
        return self.protocol is not Protocol.CONNECT_UNARY

    @property
    def encoding_header(self) -> str:
        """Header with the encoding of messages with the flag COMPRESSED; empty: messages have no flags."""
        return ENCODING_HEADERS.get(self.protocol, "")

    @property
    def is_grpc_web(self) -> bool:
        return self.protocol is Protocol.GRPC_WEB


def _kinds() -> dict[str, CallKind]:
    """Returns the call kinds by content type: Connect unary and streams, gRPC-Web, and gRPC-Web in base64."""
    kinds = []
    for name, is_json in (("proto", False), ("json", True)):
        kinds.append(CallKind(f"application/{name}", Protocol.CONNECT_UNARY, is_json))
        kinds.append(CallKind(f"application/connect+{name}", Protocol.CONNECT_STREAM, is_json))
        kinds.append(CallKind(f"application/grpc-web+{name}", Protocol.GRPC_WEB, is_json))
    for suffix in ("", "+proto"):
        kinds.append(CallKind(f"application/grpc-web-text{suffix}", Protocol.GRPC_WEB, is_text=True))
    kinds.append(CallKind("application/grpc-web", Protocol.GRPC_WEB))
    return {kind.content_type: kind for kind in kinds}


KINDS = _kinds()


def frame(flags: int, data: bytes) -> bytes:
    return flags.to_bytes(1) + len(data).to_bytes(PREFIX_BYTES - 1) + data


class RequestMessage(NamedTuple):
    """Single request message of a call."""

    data: bytes
    is_compressed: bool


def decode_message(body: bytes, kind: CallKind) -> RequestMessage:
    """Returns the single message of a body, still compressed if its frame says so; raises InvalidArgument unless the
    body is exactly one message."""
    if kind.is_text:
        body = _from_base64(body)
    if not kind.is_framed:
        return RequestMessage(body, is_compressed=False)
    end = PREFIX_BYTES + int.from_bytes(body[1:PREFIX_BYTES])
    if len(body) < PREFIX_BYTES or end != len(body):
        raise InvalidArgument("the body is not one message with its length", field="message")
    return RequestMessage(body[PREFIX_BYTES:], is_compressed=bool(body[0] & COMPRESSED))


def _from_base64(body: bytes) -> bytes:
    """Decodes a body; raises InvalidArgument if it is not base64."""
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError):
        raise InvalidArgument("the body is not base64", field="message") from None


def encode_body(data: bytes, kind: CallKind) -> bytes:
    return base64.b64encode(data) if kind.is_text else data
