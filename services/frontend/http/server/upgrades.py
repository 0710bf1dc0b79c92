"""Ignores offers to upgrade the protocol (h2c, TLS, and WebSockets on paths without them), as RFC 9110 7.8 permits: the
request is served.

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


def wants_web_socket(method: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Returns whether a request asks for a WebSocket connection (RFC 6455 4.1)."""
    offered = any(name == b"upgrade" and value.strip().lower() == b"websocket" for name, value in headers)
    return offered and method == b"GET" and version == "1.1"


def head_of(target: bytes, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of a GET request with these headers, up to its empty line."""
    lines = (b"GET %b HTTP/1.1" % target, *(name + b": " + value for name, value in headers))
    return b"\r\n".join((*lines, b"", b""))
