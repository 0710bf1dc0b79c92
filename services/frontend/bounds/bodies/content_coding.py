"""Content encodings of bodies (RFC 9110 8.4): gzip, deflate and zstd, decoded in pieces within the body's limits.

A few bytes can expand to gigabytes, so nothing is decoded ahead: each piece has a bounded size, and each encoding of a
body with several stops at the limit, even if the next one discards its output.
"""

from __future__ import annotations

import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from quire.shared.errors import BodyTooLarge, InvalidArgument, UnsupportedEncoding

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

FIELD = "content-encoding"
PLAIN = "identity"
ALIASES = {"x-gzip": "gzip"}  # RFC 9110 8.4.1.3
MAX_ENCODINGS = 4  # nested encodings of one body
MAX_MEMBERS = 1024  # gzip and zstd allow several concatenated members; bgzip makes 514 of 32 MiB
MAX_RATIO = 500  # decoded bytes per received byte; real prompts have 3 to 30
RATIO_FROM_BYTES = 1 << 20  # decoded size from which MAX_RATIO applies
PIECE_BYTES = 1 << 18
SLICE_BYTES = 1 << 12  # of received data between two checks of MAX_RATIO
WINDOW_LOG = 23  # 8 MiB, the maximum of RFC 9659 for zstd over HTTP
GZIP_BITS, ZLIB_BITS, RAW_BITS = 16 + zlib.MAX_WBITS, zlib.MAX_WBITS, -zlib.MAX_WBITS
DEFLATED = 8  # low nibble of a zlib stream's first byte


class Member(Protocol):
    """Decoder of one compressed stream, from its header to its checksum; a body may consist of several."""

    def feed(self, data: bytes, most: int) -> bytes:
        """Decodes data; returns up to `most` bytes. Raises zlib.error, ZstdError."""

    @property
    def eof(self) -> bool:
        """Whether the stream has ended."""

    @property
    def unused_data(self) -> bytes:
        """Data received after the end of the stream."""

    @property
    def has_more(self) -> bool:
        """Whether feed(b"") would return more output."""


class _Zlib:
    """Decoder of one member of gzip or deflate."""

    def __init__(self, bits: int) -> None:
        self._stream = zlib.decompressobj(bits)
        self._is_full = False

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    @property
    def has_more(self) -> bool:
        return not self.eof and (self._is_full or bool(self._stream.unconsumed_tail))

    def feed(self, data: bytes, most: int) -> bytes:
        """Implements Member.feed(); input beyond `most` bytes of output is kept for the next call."""
        piece = self._stream.decompress(self._stream.unconsumed_tail + data, most)
        self._is_full = len(piece) == most
        return piece


class _Deflate:
    """A zlib stream, as RFC 9110 requires, or raw DEFLATE, as some clients send."""

    def __init__(self) -> None:
        self._head = b""
        self._member: _Zlib | None = None

    @property
    def eof(self) -> bool:
        return self._member is not None and self._member.eof

    @property
    def unused_data(self) -> bytes:
        return b"" if self._member is None else self._member.unused_data

    @property
    def has_more(self) -> bool:
        return self._member is not None and self._member.has_more

    def feed(self, data: bytes, most: int) -> bytes:
        """Implements Member.feed(). Waits for the first two bytes, which tell zlib from raw DEFLATE."""
        if self._member is None:
            self._head += data
            if len(self._head) < 2:
                return b""
            is_zlib = self._head[0] & 0x0F == DEFLATED and int.from_bytes(self._head[:2]) % 31 == 0
            self._member, data = _Zlib(ZLIB_BITS if is_zlib else RAW_BITS), self._head
        return self._member.feed(data, most)


class _Zstd:
    """Decoder of one zstd frame, with the window limited to WINDOW_LOG."""

    def __init__(self) -> None:
        self._frame = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG})

    @property
    def eof(self) -> bool:
        return bool(self._frame.eof)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._frame.unused_data)

    @property
    def has_more(self) -> bool:
        return not self._frame.eof and not self._frame.needs_input

    def feed(self, data: bytes, most: int) -> bytes:
        return bytes(self._frame.decompress(data, most))


MEMBERS: dict[str, Callable[[], Member]] = {"gzip": lambda: _Zlib(GZIP_BITS), "deflate": _Deflate, "zstd": _Zstd}
ACCEPTED = ", ".join((*MEMBERS, PLAIN))


def encodings_of(values: Sequence[str], field: str = FIELD) -> tuple[str, ...]:
    """Returns the encodings of a body in the order they were applied. `values`: of all headers with that name. Raises
    UnsupportedEncoding."""
    named = [name.strip().lower() for value in values for name in value.split(",")]
    encodings = tuple(ALIASES.get(name, name) for name in named if name and name != PLAIN)
    for name in encodings:
        if name not in MEMBERS:
            raise UnsupportedEncoding(f"{field} is {name[:64]!r}: bodies may be encoded as {ACCEPTED}", field=field)
    if len(encodings) > MAX_ENCODINGS:
        text = f"{field} names {len(encodings)} encodings: a body may have at most {MAX_ENCODINGS}"
        raise UnsupportedEncoding(text, field=field)
    return encodings


class _Stage:
    """Decodes one encoding of a body, one compressed stream after another, within limits on size, ratio and number."""

    def __init__(self, name: str, max_bytes: int) -> None:
        self._name = name
        self._max_bytes = max_bytes
        self._member: Member | None = None
        self._num_members = 0
        self.num_decoded = 0

    def decode(self, data: bytes, num_sent: int) -> Iterator[bytes]:
        """Yields decoded pieces of `data`. `num_sent`: bytes of the body received so far. Raises InvalidArgument,
        BodyTooLarge."""
        while data or (self._member is not None and self._member.has_more):
            if self._member is None:
                self._member = self._next_member()
            piece = self._feed(self._member, data, num_sent)
            data = b""
            if self._member.eof:
                data, self._member = self._member.unused_data, None
            if piece:
                yield piece

    def end(self) -> None:
        """Raises InvalidArgument if the stream is incomplete."""
        if self._member is not None or not self._num_members:
            raise InvalidArgument(f"the body is incomplete: its {self._name} stream is truncated", field=FIELD)

    def _next_member(self) -> Member:
        """Returns the decoder of the next compressed stream. Raises InvalidArgument beyond MAX_MEMBERS."""
        self._num_members += 1
        if self._num_members > MAX_MEMBERS:
            text = f"the body has more than {MAX_MEMBERS} members of {self._name}: send it as one"
            raise InvalidArgument(text, field=FIELD)
        return MEMBERS[self._name]()

    def _feed(self, member: Member, data: bytes, num_sent: int) -> bytes:
        """Returns the next piece that the member decodes, and counts it. Raises InvalidArgument for malformed data,
        BodyTooLarge beyond the size limit or MAX_RATIO times the bytes sent."""
        try:
            piece = member.feed(data, min(PIECE_BYTES, self._max_bytes + 1))
        except (zlib.error, zstd.ZstdError) as error:
            raise InvalidArgument(f"the body is not {self._name}, which {FIELD} names: {error}", field=FIELD) from None
        self.num_decoded += len(piece)
        if self.num_decoded > self._max_bytes:
            raise BodyTooLarge(f"the body has more than {self._max_bytes} bytes once it is decoded ({self._name})")
        if self.num_decoded > max(RATIO_FROM_BYTES, MAX_RATIO * num_sent):
            text = f"the body grows to more than {MAX_RATIO} times its size as {self._name}: send it without"
            raise BodyTooLarge(text)
        return piece


class ContentDecoder:
    """Decodes one body whose encodings were applied in the order of `encodings`."""

    def __init__(self, encodings: Sequence[str], max_bytes: int) -> None:
        """Starts decoding. `max_bytes`: limit on the decoded body, also between two encodings."""
        self._num_sent = 0
        self._stages = [_Stage(name, max_bytes) for name in reversed(encodings)]

    @property
    def num_bytes(self) -> int:
        """Largest number of bytes that any stage has decoded so far."""
        return max(stage.num_decoded for stage in self._stages)

    def decode(self, data: bytes) -> Iterator[bytes]:
        """Yields the decoded body in pieces of about `PIECE_BYTES`. Raises InvalidArgument, BodyTooLarge."""
        gathered: list[bytes] = []
        num_gathered = 0
        for piece in self._pieces(data):
            gathered.append(piece)
            num_gathered += len(piece)
            if num_gathered >= PIECE_BYTES:
                yield b"".join(gathered)
                gathered, num_gathered = [], 0
        if gathered:
            yield b"".join(gathered)

    def _pieces(self, data: bytes) -> Iterator[bytes]:
        """Yields what each slice of `data` decodes to; the bytes sent are counted slice by slice, for the limit on the
        ratio."""
        for at in range(0, len(data), SLICE_BYTES):
            part = data[at : at + SLICE_BYTES]
            self._num_sent += len(part)
            yield from _through(self._stages, part, self._num_sent)

    def end(self) -> None:
        """Raises InvalidArgument if a stream is incomplete."""
        for stage in self._stages:
            stage.end()


def _through(stages: Sequence[_Stage], data: bytes, num_sent: int) -> Iterator[bytes]:
    """Yields `data` decoded by all stages in turn, piece by piece, so that no stage holds a whole body."""
    if not stages:
        yield data
        return
    for piece in stages[0].decode(data, num_sent):
        yield from _through(stages[1:], piece, num_sent)
