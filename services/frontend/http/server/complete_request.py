"""Reads a request that arrived in one piece, just far enough to refuse it.

A full parser would cost four times as much while hundreds of requests are being refused. Anything unusual yields None
and is left to the parser, which alone defines what valid HTTP is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

POST = b"POST "
REQUEST_LINE = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n")
# Headers that determine the end of the request, whether another may follow, or the content of the refusal.
RELEVANT_HEADERS = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|keep-alive|expect|upgrade|x-request-id)[ \t]*:[ \t]*([^\r]*)",
    re.IGNORECASE,
)
MAX_DIGITS = 9


class CompleteRequest(NamedTuple):
    """The parts that a refusal needs of a request which has arrived completely."""

    target: bytes
    request_id: bytes  # as sent; empty if missing


def read(data: bytes, most_header_bytes: int) -> CompleteRequest | None:
    """Returns the request, or None if it is incomplete or unusual. `data`: everything received since the last request's
    end."""
    line = REQUEST_LINE.match(data)
    end = data.find(b"\r\n\r\n", 0, most_header_bytes)
    if line is None or end < line.end() - 2:
        return None
    head = data[: end + 2]
    if head.count(b"\n") != head.count(b"\r\n") or head.count(b"\r") != head.count(b"\r\n"):
        return None
    length, request_id = b"", b""
    for name, value in RELEVANT_HEADERS.findall(head):
        match name.lower():
            case b"content-length" if not length and value.isdigit() and len(value) <= MAX_DIGITS:
                length = value
            case b"x-request-id" if not request_id:
                request_id = value
            case b"connection" if value.lower() == b"keep-alive":
                pass
            case _:
                return None
    if not length or len(data) - end - 4 != int(length):
        return None
    return CompleteRequest(line[1], request_id)
