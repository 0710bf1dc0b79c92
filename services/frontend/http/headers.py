"""What a call's scope says about the request."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from starlette.requests import HTTPConnection

from quire.shared.errors import InvalidArgument

CALL = "quire.call"  # the key of a scope under which its Call is
KEEPALIVE = "quire.keepalive_s"  # seconds of silence in a stream; 0: any
DECODED = "quire.decoded_bytes"  # of a body that was encoded, until it has been read
DIALECTS = "quire.dialects"  # the key of a scope under which the server's Dialects are
HANDLER = "quire.handler"  # where a path stands that is known before it is routed
REQUEST_ID = "x-request-id"
REQUEST_ID_BYTES = REQUEST_ID.encode()
TRACEPARENT_BYTES = b"traceparent"
ANTHROPICS = b"request-id"
TENANT = "x-tenant"
TIMEOUT = "x-request-timeout"  # seconds
MAX_ID_CHARACTERS = 256
LONGEST_TIMEOUT_S = 1e9

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """None, or empty, for what was not sent."""

    request_id: str | None
    tenant: str
    timeout_s: float | None
    arrival_s: float  # of the event loop's clock

    @property
    def deadline_s(self) -> float | None:
        return None if self.timeout_s is None else self.arrival_s + self.timeout_s


def read(http: HTTPConnection) -> CallHeaders:
    headers, call = http.headers, http.scope[CALL]
    return CallHeaders(headers.get(REQUEST_ID), tenant(http), _timeout_s(headers.get(TIMEOUT)), call.started_s)


def tenant(http: HTTPConnection) -> str:
    """Whose call it is: by its key, or, where there are none, as it says itself."""
    caller = http.scope[CALL].caller
    return str(http.headers.get(TENANT, "") if caller is None else caller.tenant)


def client_request_id(headers: Headers) -> str:
    """As the client wrote it; empty if it did not."""
    return next((value.decode("latin-1") for name, value in headers if name == REQUEST_ID_BYTES), "")


def values_of(name: bytes, headers: Headers) -> list[str]:
    """Of every header with this name, as written."""
    return [value.decode("latin-1") for known, value in headers if known == name]


def traceparent(headers: Headers) -> str:
    """W3C trace context, as the client wrote it; empty if it did not."""
    return next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT_BYTES), "")


def _timeout_s(written: str | None) -> float | None:
    if written is None:
        return None
    try:
        timeout_s = float(written)
    except ValueError:
        timeout_s = 0.0
    if not 0 < timeout_s <= LONGEST_TIMEOUT_S:
        message = f"{TIMEOUT} must be seconds, greater than 0 and at most {LONGEST_TIMEOUT_S:g}, got {written!r}."
        raise InvalidArgument(message, field=TIMEOUT)
    return timeout_s


def request_id_headers(request_id: str) -> list[tuple[bytes, bytes]]:
    """For the answer, under the names where OpenAI's clients and Anthropic's look; empty for an id that could not be a
    header."""
    if not (0 < len(request_id) <= MAX_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()):
        return []
    written = request_id.encode()
    return [(REQUEST_ID_BYTES, written), (ANTHROPICS, written)]
