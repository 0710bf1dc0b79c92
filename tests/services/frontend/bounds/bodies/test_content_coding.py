"""Decoding of content encodings within the body's limits, for any input and piece size."""

from __future__ import annotations

import gzip
import itertools
import random
import zlib
from collections.abc import Callable, Iterator

import pytest
from backports import zstd

from quire.services.frontend.bounds.bodies.content_coding import MAX_MEMBERS, PIECE_BYTES, ContentDecoder, encodings_of
from quire.shared.errors import BodyTooLarge, InvalidArgument, UnsupportedEncoding

MIB = 1 << 20


def bare_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def without_a_size(data: bytes) -> bytes:
    """Returns a zstd frame without a content size, as streaming encoders write it."""
    packer = zstd.ZstdCompressor()
    return packer.compress(data) + packer.flush()


PACKS: dict[str, list[Callable[[bytes], bytes]]] = {
    "gzip": [gzip.compress, lambda data: gzip.compress(data[:9]) + gzip.compress(data[9:])],
    "deflate": [zlib.compress, bare_deflate],
    "zstd": [zstd.compress, without_a_size, lambda data: zstd.compress(data[:9]) + zstd.compress(data[9:])],
}
WAYS = [(name, pack) for name, packs in PACKS.items() for pack in packs]


def decoded(encodings: tuple[str, ...], pieces: list[bytes], max_bytes: int = 16 * MIB) -> bytes:
    decoder = ContentDecoder(encodings, max_bytes)
    found = []
    for piece in pieces:
        found += decoder.decode(piece)
    decoder.end()
    assert all(len(piece) < 2 * PIECE_BYTES for piece in found)
    return b"".join(found)


def cut(data: bytes, draw: random.Random) -> list[bytes]:
    places = sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(6)))
    return [data[start:end] for start, end in itertools.pairwise([0, *places, len(data)])]


def test_any_encodings_in_a_row_cut_anywhere_give_the_body_back() -> None:
    draw = random.Random(4)
    for _ in range(300):
        data = draw.randbytes(draw.choice((0, 1, 70, 3000))) * draw.choice((1, 1, 40))
        chosen = [draw.choice(WAYS) for _ in range(draw.randrange(1, 4))]
        packed = data
        for _name, pack in chosen:
            packed = pack(packed)
        assert decoded(tuple(name for name, _ in chosen), cut(packed, draw)) == data


def test_large_bodies_come_in_pieces() -> None:
    data = random.Random(1).randbytes(5 * MIB // 2).hex().encode()
    for name, pack in WAYS:
        assert decoded((name,), [pack(data)]) == data


@pytest.mark.parametrize(("name", "pack"), WAYS)
def test_a_truncated_or_mislabelled_body_is_refused(name: str, pack: Callable[[bytes], bytes]) -> None:
    packed = pack(b"hello, hello, hello")
    for sent in (packed[:-1], packed[:3], b""):
        with pytest.raises(InvalidArgument, match=f"{name} stream is truncated"):
            decoded((name,), [sent])
    for sent in (b'{"prompt": "hi"}', packed + b'{"prompt"', packed[:-4] + b"\xff\xff\xff\xff\xff\xff"):
        with pytest.raises(InvalidArgument, match=f"which content-encoding names|{name} stream is truncated"):
            decoded((name,), [sent])


def taken(packed: bytes, step: int, most: int) -> Iterator[bytes]:
    """Feeds a decoder step by step; yields at most `most` bytes at a time."""
    for at in range(0, len(packed), step):
        assert at < most, "more of the body is read than it takes to refuse it"
        yield packed[at : at + step]


BOMB = b"a" * (64 * MIB)  # mlflow#24784: 6 KB of zstd that decode to 200 MB


@pytest.mark.parametrize(
    ("encodings", "pack"),
    [
        (("gzip",), lambda: gzip.compress(BOMB)),
        (("deflate",), lambda: zlib.compress(BOMB)),
        (("zstd",), lambda: zstd.compress(BOMB)),
        (("zstd",), lambda: without_a_size(BOMB)),
        (("gzip", "gzip"), lambda: gzip.compress(gzip.compress(BOMB))),
        (("gzip", "zstd"), lambda: zstd.compress(gzip.compress(b"") * (2 * MIB))),  # the gzip inside decodes to nothing
    ],
)
def test_what_grows_without_measure_ends_early(encodings: tuple[str, ...], pack: Callable[[], bytes]) -> None:
    decoder = ContentDecoder(encodings, 32 * MIB)
    pieces = (piece for sent in taken(pack(), 1024, MIB) for piece in decoder.decode(sent))
    with pytest.raises((BodyTooLarge, InvalidArgument), match=r"500 times its size|more than 1024 members"):
        sum(map(len, pieces))
    assert decoder.num_bytes <= 2 * MIB


def test_the_limit_counts_what_is_decoded() -> None:
    data = random.Random(1).randbytes(60_000).hex().encode()
    for name, pack in WAYS:
        assert decoded((name,), [pack(data)], len(data)) == data
        with pytest.raises(BodyTooLarge, match="more than 119999 bytes once it is decoded"):
            decoded((name,), [pack(data)], len(data) - 1)


def test_members_without_end_are_refused() -> None:
    assert decoded(("gzip",), [gzip.compress(b"a") * MAX_MEMBERS]) == b"a" * MAX_MEMBERS
    with pytest.raises(InvalidArgument, match="more than 1024 members of gzip: send it as one"):
        decoded(("gzip",), [gzip.compress(b"") * (MAX_MEMBERS + 1)])


def test_members_of_a_block_compressor_are_accepted() -> None:
    """bgzip writes a member for every 65,280 bytes, and an empty one at the end."""
    data = random.Random(2).randbytes(4 * MIB).hex().encode()
    blocks = [gzip.compress(data[at : at + 65_280], 1) for at in range(0, len(data), 65_280)]
    assert decoded(("gzip",), [b"".join([*blocks, gzip.compress(b"")])]) == data


def test_a_window_beyond_what_http_allows_is_refused() -> None:
    """RFC 9659 allows 8 MiB; an encoder run with `--ultra --long=27` needs 128."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: 27})
    packed = packer.compress(random.Random(1).randbytes(9 * MIB)) + packer.flush()
    with pytest.raises(InvalidArgument, match="the body is not zstd"):
        decoded(("zstd",), [packed])


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (["gzip"], ("gzip",)),
        (["GZIP"], ("gzip",)),
        (["x-gzip"], ("gzip",)),
        (["deflate, gzip"], ("deflate", "gzip")),
        (["deflate", "gzip"], ("deflate", "gzip")),
        (["identity"], ()),
        (["identity, zstd"], ("zstd",)),
        ([""], ()),
    ],
)
def test_names_of_encodings(values: list[str], found: tuple[str, ...]) -> None:
    assert encodings_of(values) == found


@pytest.mark.parametrize("named", ["br", "compress", "gzip, br", "gzip;q=1", "aes128gcm", ", ".join(["gzip"] * 5)])
def test_other_encodings_are_refused_with_those_that_are_accepted(named: str) -> None:
    with pytest.raises(UnsupportedEncoding) as refused:
        encodings_of([named])
    assert refused.value.field == "content-encoding"
    assert "gzip, deflate, zstd, identity" in str(refused.value) or "a body may have at most 4" in str(refused.value)
