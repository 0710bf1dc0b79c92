"""Workers fetch pixels over a port of its own: authenticated, in parts, and only what is there."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from quire.services.frontend.composition.media_port import MediaPort
from quire.services.frontend.media.service import PART_BYTES
from quire.services.frontend.media.store import MediaStore
from quire.services.frontend.media.tiles import MediaTiles
from quire.shared.errors import Unauthenticated
from quire.shared.media.processor import TileLayout
from quire.shared.pb.frontend.v1 import media_pb2 as pb
from quire.shared.pb.frontend.v1 import media_pb2_grpc
from quire.shared.rpc.trust import Dialler
from quire.shared.security.secret_file import SecretFile
from quire.shared.settings import FrontendSettings
from tests.services.frontend.media.fetching import fetch_pixels

IDENTIFIER = bytes(range(32))


@asynccontextmanager
async def serving(tiles: MediaTiles, **settings: str) -> AsyncIterator[str]:
    """Serves one item at the address."""
    store = MediaStore(0, 1 << 40)

    async def make() -> MediaTiles:
        return tiles

    port = MediaPort(FrontendSettings(model="m", **settings), store)  # type: ignore[arg-type]
    await port.start()
    try:
        with store.holding() as holds:
            await holds.hold(IDENTIFIER, make)
            yield port.address
    finally:
        await port.stop()
        await store.close()


def pattern(num_tiles: int, height: int, width: int) -> MediaTiles:
    count = num_tiles * height * width * 3
    pixels = bytes(range(251)) * (count // 251 + 1)
    return MediaTiles(TileLayout(num_tiles, height, width, (num_tiles, 7)), pixels[:count])


async def test_large_items_come_in_parts(tmp_path: Path) -> None:
    tiles = pattern(13, 448, 448)
    assert len(tiles.pixels) > 7 * PART_BYTES
    async with serving(tiles) as address:
        head, pixels = await fetch_pixels(address, IDENTIFIER)
    assert (head.num_tiles, head.height, head.width) == (13, 448, 448)
    assert pixels == tiles.pixels


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        (
            pb.FetchMediaRequest(media=pb.MediaRequest(identifier=bytes(32))),
            "NOT_FOUND",
            "does not keep the media item",
        ),
        (pb.FetchMediaRequest(media=pb.MediaRequest(identifier=b"x")), "INVALID_ARGUMENT", "32 are needed"),
        (pb.FetchMediaRequest(), "FAILED_PRECONDITION", "the first message of a call must be media"),
        (None, "FAILED_PRECONDITION", "the first message of a call must be media"),
    ],
)
async def test_what_is_not_there_is_refused(message: pb.FetchMediaRequest | None, code: str, said: str) -> None:
    async with serving(pattern(1, 2, 2)) as address, grpc.aio.insecure_channel(address) as channel:
        call = media_pb2_grpc.MediaServiceStub(channel).FetchMedia()
        if message is not None:
            await call.write(message)
        await call.done_writing()
        with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
            await call.read()
        assert refused.value.code().name == code


async def test_a_caller_that_does_not_know_the_secret_gets_nothing(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("s" * 40)
    (tmp_path / "other").write_text("o" * 40)
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "other").chmod(0o600)
    async with serving(pattern(1, 2, 2), cluster_secret_file=str(tmp_path / "secret")) as address:
        knows = Dialler("worker w", secret=SecretFile(str(tmp_path / "secret"), "cluster_secret_file"))
        _, pixels = await fetch_pixels(address, IDENTIFIER, knows)
        assert len(pixels) == 12
        with pytest.raises(grpc.aio.AioRpcError, match="requires proof of its cluster secret"):
            await fetch_pixels(address, IDENTIFIER)
        wrong = Dialler("worker w", secret=SecretFile(str(tmp_path / "other"), "cluster_secret_file"))
        with pytest.raises(Unauthenticated, match="does not know the cluster secret"):
            await fetch_pixels(address, IDENTIFIER, wrong)


async def test_a_caller_that_reads_nothing_holds_no_other_up(tmp_path: Path) -> None:
    async with serving(pattern(40, 448, 448)) as address, grpc.aio.insecure_channel(address) as channel:
        slow = media_pb2_grpc.MediaServiceStub(channel).FetchMedia()
        await slow.write(pb.FetchMediaRequest(media=pb.MediaRequest(identifier=IDENTIFIER)))
        await slow.read()
        found = await asyncio.gather(*(fetch_pixels(address, IDENTIFIER) for _ in range(4)))
        assert {len(pixels) for _, pixels in found} == {40 * 448 * 448 * 3}
        slow.cancel()


@pytest.mark.parametrize(
    ("settings", "host"),
    [
        ({}, "127.0.0.1"),
        ({"host": "0.0.0.0"}, "127.0.0.1"),  # without a secret only this machine's workers are served
        ({"host": "0.0.0.0", "advertise": "front", "insecure": True}, "front"),
        ({"host": "0.0.0.0", "media_host": "127.0.0.1"}, "127.0.0.1"),
    ],
)
async def test_the_address_is_one_that_workers_reach(settings: dict[str, str], host: str) -> None:
    port = MediaPort(FrontendSettings(model="m", **settings), MediaStore(0, 1))  # type: ignore[arg-type]
    assert port.address.rpartition(":")[0] == host
    await port.stop()


async def test_a_model_of_texts_opens_no_port() -> None:
    port = MediaPort(FrontendSettings(model="m"), None)
    await port.start()
    assert port.address == ""
    await port.stop()
