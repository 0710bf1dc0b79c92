"""Status of a finished call, as Connect's JSON or as gRPC-Web's trailers."""

from __future__ import annotations

import base64
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import quote

import orjson
from google.rpc import status_pb2
from grpc import StatusCode

from quire.services.frontend.grpc_edge.errors import status_of
from quire.shared.errors import QuireError, transport

DETAILS = "grpc-status-details-bin"
UNESCAPED = " !\"#$&'()*+,-./:;<=>?@[\\]^_`{|}~"  # not escaped in a grpc-message, besides letters and digits
CLIENT_GONE = 499

# Connect's name of a code, and the HTTP status of a unary call that ends with it.
CODES: dict[StatusCode, tuple[str, int]] = {
    StatusCode.CANCELLED: ("canceled", CLIENT_GONE),
    StatusCode.UNKNOWN: ("unknown", HTTPStatus.INTERNAL_SERVER_ERROR),
    StatusCode.INVALID_ARGUMENT: ("invalid_argument", HTTPStatus.BAD_REQUEST),
    StatusCode.DEADLINE_EXCEEDED: ("deadline_exceeded", HTTPStatus.GATEWAY_TIMEOUT),
    StatusCode.NOT_FOUND: ("not_found", HTTPStatus.NOT_FOUND),
    StatusCode.PERMISSION_DENIED: ("permission_denied", HTTPStatus.FORBIDDEN),
    StatusCode.RESOURCE_EXHAUSTED: ("resource_exhausted", HTTPStatus.TOO_MANY_REQUESTS),
    StatusCode.FAILED_PRECONDITION: ("failed_precondition", HTTPStatus.BAD_REQUEST),
    StatusCode.UNIMPLEMENTED: ("unimplemented", HTTPStatus.NOT_IMPLEMENTED),
    StatusCode.INTERNAL: ("internal", HTTPStatus.INTERNAL_SERVER_ERROR),
    StatusCode.UNAVAILABLE: ("unavailable", HTTPStatus.SERVICE_UNAVAILABLE),
    StatusCode.UNAUTHENTICATED: ("unauthenticated", HTTPStatus.UNAUTHORIZED),
}


class WebCallStatus(NamedTuple):
    """Status of a finished call, which each web protocol encodes differently; `details` are a serialized
    google.rpc.Status, or empty."""

    code: StatusCode
    message: str = ""
    details: bytes = b""

    @property
    def http_status(self) -> int:
        return CODES[self.code][1]

    def as_error(self) -> dict[str, Any]:
        """Returns the status as Connect's error object; details are protobuf bytes in base64 without padding."""
        error: dict[str, Any] = {"code": CODES[self.code][0], "message": self.message}
        if self.details:
            details = status_pb2.Status.FromString(self.details).details
            error["details"] = [
                {"type": detail.TypeName(), "value": base64.b64encode(detail.value).decode().rstrip("=")}
                for detail in details
            ]
        return error

    def as_json(self) -> bytes:
        """Returns the body of a failed unary Connect call."""
        return orjson.dumps(self.as_error())

    def as_last_message(self, metadata: dict[str, str]) -> bytes:
        """Returns the JSON of a Connect stream's last message: the error, unless the status is OK, and the metadata."""
        error: dict[str, Any] = {} if self.code is StatusCode.OK else {"error": self.as_error()}
        if metadata:
            error["metadata"] = {name: [value] for name, value in metadata.items()}
        return orjson.dumps(error)

    def as_trailers(self, metadata: dict[str, str]) -> bytes:
        """Returns the status and metadata as the header lines of gRPC-Web's trailers."""
        lines = {"grpc-status": str(self.code.value[0]), "grpc-message": quote(self.message, safe=UNESCAPED)}
        if self.details:
            lines[DETAILS] = base64.b64encode(self.details).decode().rstrip("=")
        return "".join(f"{name}: {value}\r\n" for name, value in (lines | metadata).items()).encode("latin-1")


OK = WebCallStatus(StatusCode.OK)


def status_for(error: QuireError) -> WebCallStatus:
    status = status_of(error)
    return WebCallStatus(transport(error).grpc_code, status.message, status.SerializeToString())
