"""One tree of errors, and one table that maps it to gRPC codes, HTTP statuses and OpenAI error types.

Code raises the classes; only the edges use the table. `to_proto` and `from_proto` convert errors for transport
between services.
"""

from __future__ import annotations

from dataclasses import dataclass

import grpc

from quire.shared.pb.common.v1 import finish_pb2 as pb

FIRST_CHARACTERS, LAST_CHARACTERS = (
    1200,
    400,
)  # parts of a long message that are kept: the cause is at its beginning or its end
FIELD_CHARACTERS = 200
NAME_CHARACTERS = 256


def _shortened(text: str) -> str:
    """Limits the length of a message, which may quote megabytes of a request."""
    if len(text) <= FIRST_CHARACTERS + LAST_CHARACTERS:
        return text
    return f"{text[:FIRST_CHARACTERS]} ... {text[-LAST_CHARACTERS:]}"


def truncated_name(text: str) -> str:
    """Limits the length of a client-supplied name for logs and metrics."""
    return text[:NAME_CHARACTERS]


class QuireError(Exception):
    """Base class of errors that end a request or a session and are reported to its sender."""

    code = pb.ERROR_CODE_INTERNAL

    def __init__(self, message: str, *, field: str = "", retry_after_ms: int = 0, reason: str = "") -> None:
        """Shortens a long `message` in its middle. `field`: request field or setting at fault; `retry_after_ms`: delay
        after which the sender may retry, 0: none is stated; `reason`: machine-readable word for clients, not carried
        between services."""
        message = _shortened(message)
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = field[:FIELD_CHARACTERS]
        self.retry_after_ms = retry_after_ms


class InvalidArgument(QuireError):
    """The request is invalid; retrying cannot help."""

    code = pb.ERROR_CODE_INVALID_ARGUMENT


class NotFound(QuireError):
    """The model, adapter or other resource does not exist."""

    code = pb.ERROR_CODE_NOT_FOUND


class ResourceExhausted(QuireError):
    """A limit is exceeded; `retry_after_ms` says when to retry."""

    code = pb.ERROR_CODE_RESOURCE_EXHAUSTED


class Unavailable(QuireError):
    """No service can handle the request at present."""

    code = pb.ERROR_CODE_UNAVAILABLE


class DeadlineExceeded(QuireError):
    """The client's deadline passed, or could not have been met."""

    code = pb.ERROR_CODE_DEADLINE_EXCEEDED


class FailedPrecondition(QuireError):
    """Two sides are incompatible, or a state forbids the call: mismatched block size, wrong epoch."""

    code = pb.ERROR_CODE_FAILED_PRECONDITION


class Unauthenticated(QuireError):
    """The caller is not authenticated."""

    code = pb.ERROR_CODE_UNAUTHENTICATED


class PermissionDenied(QuireError):
    """The caller is authenticated, but not permitted to do this."""

    code = pb.ERROR_CODE_PERMISSION_DENIED


class Unimplemented(QuireError):
    """A known feature that is not supported here."""

    code = pb.ERROR_CODE_UNIMPLEMENTED


class UnsupportedEncoding(Unimplemented):
    """A request body has an encoding that is not supported."""


class BodyTooLarge(InvalidArgument):
    """A request body, or its decoded form, exceeds the size limit."""


class Internal(QuireError):
    """A fault of the server."""

    code = pb.ERROR_CODE_INTERNAL


@dataclass(frozen=True, slots=True)
class Transport:
    """Representation of an error in gRPC, HTTP and the OpenAI API."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str


TRANSPORTS: dict[int, Transport] = {
    pb.ERROR_CODE_INVALID_ARGUMENT: Transport(grpc.StatusCode.INVALID_ARGUMENT, 400, "BadRequestError"),
    pb.ERROR_CODE_NOT_FOUND: Transport(grpc.StatusCode.NOT_FOUND, 404, "NotFoundError"),
    pb.ERROR_CODE_RESOURCE_EXHAUSTED: Transport(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "RateLimitError"),
    pb.ERROR_CODE_UNAVAILABLE: Transport(grpc.StatusCode.UNAVAILABLE, 503, "ServiceUnavailableError"),
    pb.ERROR_CODE_DEADLINE_EXCEEDED: Transport(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "DeadlineExceededError"),
    pb.ERROR_CODE_FAILED_PRECONDITION: Transport(grpc.StatusCode.FAILED_PRECONDITION, 409, "ConflictError"),
    pb.ERROR_CODE_UNAUTHENTICATED: Transport(grpc.StatusCode.UNAUTHENTICATED, 401, "AuthenticationError"),
    pb.ERROR_CODE_PERMISSION_DENIED: Transport(grpc.StatusCode.PERMISSION_DENIED, 403, "PermissionDeniedError"),
    pb.ERROR_CODE_UNIMPLEMENTED: Transport(grpc.StatusCode.UNIMPLEMENTED, 400, "BadRequestError"),
    pb.ERROR_CODE_INTERNAL: Transport(grpc.StatusCode.INTERNAL, 500, "InternalServerError"),
}

# Errors with a more specific HTTP status than that of their code.
_OWN_TRANSPORTS: dict[type[QuireError], Transport] = {
    UnsupportedEncoding: Transport(grpc.StatusCode.UNIMPLEMENTED, 415, "UnsupportedMediaTypeError"),
    BodyTooLarge: Transport(grpc.StatusCode.INVALID_ARGUMENT, 413, "RequestEntityTooLargeError"),
}

_BY_CODE: dict[int, type[QuireError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        NotFound,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        FailedPrecondition,
        Unauthenticated,
        PermissionDenied,
        Unimplemented,
        Internal,
    )
}


def transport(error: QuireError) -> Transport:
    return transport_of(type(error))


def transport_of(kind: type[QuireError]) -> Transport:
    return _OWN_TRANSPORTS.get(kind) or TRANSPORTS[kind.code]


def to_proto(error: QuireError) -> pb.Error:
    return pb.Error(code=error.code, message=error.message, field=error.field, retry_after_ms=error.retry_after_ms)


def from_proto(error: pb.Error) -> QuireError:
    cls = _BY_CODE.get(error.code, Internal)
    return cls(error.message, field=error.field, retry_after_ms=error.retry_after_ms)
