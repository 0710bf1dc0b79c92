"""Request headers, read from a call's scope."""

from __future__ import annotations

from collections.abc import Iterable

from starlette.requests import HTTPConnection

from quire.services.frontend.request.call_headers import CallHeaders
from quire.shared.errors import InvalidArgument

CALL = "quire.call"  # scope key of the Call
KEEPALIVE = "quire.keepalive_s"  # scope key: seconds between keep-alives of a silent stream; 0: none
DECODED = "quire.decoded_bytes"  # scope key of the DecodedBytes of an encoded body
DIALECTS = "quire.dialects"  # scope key of the server's Dialects
HANDLER = "quire.handler"  # scope key of a route template known before routing
REQUEST_ID = "x-request-id"
REQUEST_ID_BYTES = REQUEST_ID.encode()
TRACEPARENT_BYTES = b"traceparent"
ANTHROPICS = b"request-id"
TENANT = "x-tenant"
TIMEOUT = "x-request-timeout"  # seconds
MAX_ID_CHARACTERS = 256
LONGEST_TIMEOUT_S = 1e9

Headers = Iterable[tuple[bytes, bytes]]  # names in lower case


def read(http: HTTPConnection) -> CallHeaders:
    """Returns the headers that every dialect reads. Raises InvalidArgument for an invalid timeout."""
    headers, call = http.headers, http.scope[CALL]
    return CallHeaders(headers.get(REQUEST_ID), tenant(http), _timeout_s(headers.get(TIMEOUT)), call.started_s)


def tenant(http: HTTPConnection) -> str:
    """Returns the call's tenant: that of its API key, or, without keys, the one it states."""
    caller = http.scope[CALL].caller
    return str(http.headers.get(TENANT, "") if caller is None else caller.tenant)


def client_request_id(headers: Headers) -> str:
    """Returns the request id as the client sent it, or an empty string."""
    return next((value.decode("latin-1") for name, value in headers if name == REQUEST_ID_BYTES), "")


def values_of(name: bytes, headers: Headers) -> list[str]:
    """Returns the values of all headers with this name."""
    return [value.decode("latin-1") for known, value in headers if known == name]


def traceparent(headers: Headers) -> str:
    """Returns the W3C trace context as the client sent it, or an empty string."""
    return next((value.decode("latin-1") for name, value in headers if name == TRACEPARENT_BYTES), "")


def _timeout_s(written: str | None) -> float | None:
    """Returns the timeout in seconds, None if the header was not sent. Raises InvalidArgument for any other text than a
    number in (0, LONGEST_TIMEOUT_S]."""
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
    """Returns response headers with the id, under the names that OpenAI's and Anthropic's clients read; empty for an id
    that is not valid in a header."""
    if not (0 < len(request_id) <= MAX_ID_CHARACTERS and request_id.isascii() and request_id.isprintable()):
        return []
    written = request_id.encode()
    return [(REQUEST_ID_BYTES, written), (ANTHROPICS, written)]
