"""Offers of another protocol (h2c, websocket, TLS) are ignored, as RFC 9110 7.8 lets a server: the request is served.

The parser stops behind the headers of such a request and skips its body. The request's head is therefore written once
more without the offer, for a new parser, which alone decides where the body ends.
"""

from __future__ import annotations

from collections.abc import Iterable

CONNECT = b"CONNECT"  # asks for a tunnel: nothing of HTTP would follow
OFFERS = (b"upgrade", b"http2-settings")


def without_upgrade(method: bytes, target: bytes, version: str, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Returns the head of the request, up to its empty line; `headers`: as parsed, names in lower case."""
    lines = [b"%b %b HTTP/%b" % (method, target, version.encode())]
    for name, value in headers:
        if name not in OFFERS:
            kept = _kept_options(value) if name == b"connection" else value
            lines.append(name + b": " + kept)
    return b"\r\n".join((*lines, b"", b""))


def _kept_options(value: bytes) -> bytes:
    """The options of a Connection header that are no offer."""
    options = (option.strip() for option in value.split(b","))
    return b", ".join(option for option in options if option.lower() not in OFFERS)
