"""HTTP/2 frames as bytes (RFC 9113, RFC 7541), so that no library corrects them."""

from __future__ import annotations

from collections.abc import Iterator

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
MAX_CONCURRENT_STREAMS, MAX_HEADER_LIST_SIZE = 3, 6  # of SETTINGS
END_STREAM, ACK, END_HEADERS, PADDED = 1, 1, 4, 8
FRAME_HEAD_BYTES = 9
OWN_HEADERS = b":path", b":authority", b"te", b"content-type"
POST_OVER_HTTP = b"\x83\x86"  # :method and :scheme of the static table
FIRST_OF_OWN = 62  # index of the entry that was added to the dynamic table last


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


def _text(text: bytes) -> bytes:
    """A string literal without Huffman coding."""
    if len(text) < 127:
        return bytes([len(text)]) + text
    rest, digits = len(text) - 127, bytearray([127])
    while rest >= 128:
        digits.append(rest & 127 | 128)
        rest >>= 7
    return bytes([*digits, rest]) + text


def added(name: bytes, value: bytes) -> bytes:
    """A header that is added to the dynamic table."""
    return b"\x40" + _text(name) + _text(value)


def named(index: int) -> bytes:
    """A header of a table, as one byte."""
    return bytes([0x80 | index])


def call_headers(path: str) -> bytes:
    """The head of a gRPC call; all headers but the first two are added to the dynamic table."""
    own = path.encode(), b"x", b"trailers", b"application/grpc"
    return POST_OVER_HTTP + b"".join(added(name, value) for name, value in zip(OWN_HEADERS, own, strict=True))


def same_headers(behind: int = 0) -> bytes:
    """The head of another such call; `behind`: number of headers added to the table since."""
    last = FIRST_OF_OWN + behind
    return POST_OVER_HTTP + b"".join(named(last + place) for place in reversed(range(len(OWN_HEADERS))))


def read(data: bytearray) -> Iterator[tuple[int, int, int]]:
    """Takes complete frames off the front of `data`; yields kind, flags and stream of each."""
    while len(data) >= FRAME_HEAD_BYTES:
        end = FRAME_HEAD_BYTES + int.from_bytes(data[:3], "big")
        if len(data) < end:
            return
        yield data[3], data[4], int.from_bytes(data[5:9], "big") & 0x7FFF_FFFF
        del data[:end]
