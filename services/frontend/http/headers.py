"""What a call's headers say about the request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shared.errors import InvalidArgument

REQUEST_ID = "x-request-id"
TENANT = "x-tenant"
TIMEOUT = "x-request-timeout"  # seconds
LONGEST_TIMEOUT_S = 1e9


@dataclass(frozen=True, slots=True)
class CallHeaders:
    """None, or empty, for what was not sent."""

    request_id: str | None
    tenant: str
    timeout_s: float | None


def read(headers: Mapping[str, str]) -> CallHeaders:
    return CallHeaders(headers.get(REQUEST_ID), headers.get(TENANT, ""), _timeout_s(headers.get(TIMEOUT)))


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


def request_id_header(request_id: str | None) -> dict[str, str]:
    """For the answer; empty for an id that could not be a header."""
    return {REQUEST_ID: request_id} if request_id and request_id.isascii() and request_id.isprintable() else {}
