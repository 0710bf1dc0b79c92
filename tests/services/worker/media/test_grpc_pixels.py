"""Pixels over real gRPC: they arrive unchanged, and a frontend that lies, hangs or ends costs one item."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import grpc
import grpc.aio
import numpy as np
import pytest

from quire.services.worker.media import grpc_pixels
from quire.services.worker.media.grpc_pixels import GrpcPixels
from quire.services.worker.step.fetched_item import Pixels
from quire.shared.errors import InvalidArgument, NotFound, Unauthenticated, Unavailable
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.rpc.trust import Dialler, HandshakeAcceptor
from quire.shared.security.secret_file import SecretFile
from tests.services.worker.media.media_server import Answer, Context, MediaServer, head_of, honest, parts_of, serving
from tests.services.worker.media.pictures import identifier_of, picture
from tests.waiting import loop_turns

PIXELS = np.concatenate([picture(1), picture(2)])  # two tiles, several parts


@asynccontextmanager
async def source(dialler: Dialler | None = None, **bounds: float) -> AsyncIterator[GrpcPixels]:
    pixels = GrpcPixels(dialler or Dialler(), replace(grpc_pixels.BOUNDS, **bounds))
    yield pixels
    await pixels.close()


async def fetched(server: MediaServer, pixels: Pixels = PIXELS, **bounds: float) -> Pixels:
    async with serving(server) as address, source(**bounds) as client:
        return await client.fetch(identifier_of(pixels), address)


async def test_pixels_arrive_unchanged() -> None:
    found = await fetched(MediaServer(PIXELS))
    assert np.array_equal(found, PIXELS)


async def test_an_unknown_item_is_not_found_and_not_asked_for_again() -> None:
    server = MediaServer()
    with pytest.raises(NotFound, match="no such item"):
        await fetched(server)
    assert server.num_calls == 1


def answering(*messages: pb.FetchMediaResponse) -> Answer:
    async def answer(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
        for message in messages:
            yield message

    return answer


HEAD, PARTS = head_of(PIXELS), parts_of(PIXELS)
LIES: dict[str, tuple[Answer, str]] = {
    "nothing": (answering(), "sent nothing instead of the size"),
    "no head": (answering(*PARTS), "sent part instead of the size"),
    "an empty message": (answering(pb.FetchMediaResponse()), "sent None instead of the size"),
    "two heads": (answering(HEAD, HEAD), "sent head instead of bytes"),
    "too few bytes": (answering(HEAD, *PARTS[:-1]), "sent 4000 of 4704 bytes"),
    "too many bytes": (answering(HEAD, *PARTS, PARTS[0]), "sent 5704 of 4704 bytes"),
    "an empty part": (answering(HEAD, pb.FetchMediaResponse(part=b""), *PARTS), "sent 0 of 4704 bytes"),
    "other pixels": (answering(HEAD, *PARTS[:-1], pb.FetchMediaResponse(part=b"\0" * 704)), "match their checksum"),
    "another checksum": (answering(head_of(PIXELS, checksum=1), *PARTS), "do not match their checksum"),
    "no tiles": (answering(head_of(PIXELS, num_tiles=0), *PARTS), "announced 0 x 28 x 28 pixels"),
    "no width": (answering(head_of(PIXELS, width=0)), "announced 2 x 28 x 0 pixels"),
    "a bomb": (answering(head_of(PIXELS, height=2**32 - 1, width=2**32 - 1)), "announced 2 x 4294967295"),
    "more than the bound": (answering(head_of(PIXELS, num_tiles=114_131)), "bytes of at most 268435456"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_costs_the_item_and_is_not_asked_for_again(lie: str) -> None:
    server = MediaServer(PIXELS)
    answer, words = LIES[lie]
    server.answers = [answer]
    with pytest.raises(Unavailable, match=words):
        await fetched(server)
    assert server.num_calls == 1


async def hanging(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
    await asyncio.Event().wait()
    yield HEAD


async def hanging_in_the_middle(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
    yield HEAD
    yield PARTS[0]
    await asyncio.Event().wait()


async def trickling(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
    yield head_of(pixels, num_tiles=10_000)
    while True:
        yield pb.FetchMediaResponse(part=b"x")
        await loop_turns()


@pytest.mark.parametrize("answer", [hanging, hanging_in_the_middle])
async def test_a_frontend_that_hangs_is_given_up(answer: Answer) -> None:
    server = MediaServer(PIXELS)
    server.answers = [answer]
    with pytest.raises(Unavailable, match="did not send the pixels in time"):
        await fetched(server, first_part_timeout_s=0.1, next_part_timeout_s=0.1)


async def test_a_frontend_that_sends_a_byte_at_a_time_is_given_up() -> None:
    server = MediaServer(PIXELS)
    server.answers = [trickling]
    with pytest.raises(Unavailable, match="did not send the pixels in time"):
        await fetched(server, first_part_timeout_s=0.1, min_bytes_per_s=1 << 40)


async def refusing(pixels: Pixels, context: Context) -> AsyncIterator[pb.FetchMediaResponse]:
    await context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
    yield HEAD


async def test_an_unavailable_frontend_is_asked_twice() -> None:
    server = MediaServer(PIXELS)
    server.answers = [refusing, honest]
    assert np.array_equal(await fetched(server), PIXELS)
    assert server.num_calls == 2
    server.answers = [refusing]
    with pytest.raises(Unavailable, match="restarting"):
        await fetched(server)
    assert server.num_calls == 4


async def test_a_frontend_that_is_not_there_is_unavailable() -> None:
    async with serving(MediaServer(PIXELS)) as address:
        pass
    async with source() as client:
        with pytest.raises(Unavailable):
            await client.fetch(identifier_of(PIXELS), address)


@pytest.mark.parametrize(
    "address",
    [
        *["", "localhost", "localhost:", ":1", "localhost:0", "localhost:65536", "http://a:1", "unix:1", "UNIX:1"],
        *["unix:/run/docker.sock", "dns:///a:1", "ipv4:80", "vsock:1", "a b:1", "a:1,b:2", "[::1:1", "a:1\n", "a:1/x"],
    ],
)
async def test_an_address_is_a_host_and_a_port(address: str) -> None:
    async with source() as client:
        with pytest.raises(InvalidArgument, match="is not HOST:PORT"):
            await client.fetch(identifier_of(PIXELS), address)


async def test_both_sides_prove_the_secret(tmp_path: Path) -> None:
    for name in ("right", "wrong"):
        (tmp_path / name).write_text(name * 16)
        (tmp_path / name).chmod(0o600)
    right, wrong = (SecretFile(str(tmp_path / name), "cluster_secret_file") for name in ("right", "wrong"))
    server = MediaServer(PIXELS, door=HandshakeAcceptor(right, "frontend f"))
    async with serving(server) as address:
        async with source(Dialler("worker w", secret=right)) as client:
            assert np.array_equal(await client.fetch(identifier_of(PIXELS), address), PIXELS)
        for dialler in (Dialler("worker w", secret=wrong), Dialler("worker w")):
            async with source(dialler) as client:
                with pytest.raises(Unauthenticated):
                    await client.fetch(identifier_of(PIXELS), address)
    async with serving(MediaServer(PIXELS)) as address, source(Dialler("worker w", secret=right)) as client:
        with pytest.raises(Unauthenticated, match="there is no cluster secret here"):
            await client.fetch(identifier_of(PIXELS), address)
