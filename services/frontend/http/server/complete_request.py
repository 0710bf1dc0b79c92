"""A call that has come in one piece, as most do, read just far enough to refuse it.

What a parser would tell header by header costs four times as much while hundreds are to be refused. Whatever is not
plain here is None and left to the parser: it alone says what HTTP is.
"""

from __future__ import annotations

import re
from typing import NamedTuple

POST = b"POST "
LINE = re.compile(rb"POST (/[!-~]*) HTTP/1\.1\r\n")
# Headers that decide where a call ends, whether another may follow, or what its answer holds.
TELLING = re.compile(
    rb"\r\n(content-length|transfer-encoding|connection|keep-alive|expect|upgrade|x-request-id)[ \t]*:[ \t]*([^\r]*)",
    re.IGNORECASE,
)
MAX_DIGITS = 9


class CompleteRequest(NamedTuple):
    target: bytes
    request_id: bytes  # as it was sent; empty if it was not


def read(data: bytes, most_header_bytes: int) -> CompleteRequest | None:
    """`data`: all that a connection has sent since the last call's end."""
    line = LINE.match(data)
    end = data.find(b"\r\n\r\n", 0, most_header_bytes)
    if line is None or end < line.end() - 2:
        return None
    head = data[: end + 2]
    if head.count(b"\n") != head.count(b"\r\n") or head.count(b"\r") != head.count(b"\r\n"):
        return None
    length, request_id = b"", b""
    for name, value in TELLING.findall(head):
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
