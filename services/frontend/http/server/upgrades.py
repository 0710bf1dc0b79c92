"""Ignores offers to upgrade the protocol (h2c, websocket, TLS), as RFC 9110 7.8 permits: the request is served.

The parser stops after the headers of such a request and skips its body. The head is therefore rewritten without the
offer for a new parser, which alone determines the end of the body.
"""

from __future__ import annotations

from collections.abc import Iterable

CONNECT = b"CONNECT"  # requests a tunnel, which is refused
OFFERS = (b"upgrade", b"http2-settings")


def without_upgrade(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of the request without its offer to upgrade, up to its empty line; `headers`: as parsed, names
    in lower case."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name not in OFFERS:
            kept = _kept_options(value) if name == b"connection" else value
            lines.append(name + b": " + kept)
    return b"\r\n".join((*lines, b"", b""))


def _kept_options(value: bytes) -> bytes:
    """Returns the options of a Connection header without offers."""
    options = (option.strip() for option in value.split(b","))
    return b", ".join(option for option in options if option.lower() not in OFFERS)
