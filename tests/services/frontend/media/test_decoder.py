"""Processes decode and render pictures as the model's processor does, and survive hostile files."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quire.services.frontend.media.decoder import MediaDecoder
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.request.media import MediaOptions
from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import TileLayout
from quire.shared.media.registry import read_media_processor
from tests.services.frontend.media.seeing_folder import SIDE, plain, png, write_seeing_folder
from tests.waiting import loop_turns

BOUNDS = MediaBounds()
LAYOUT = TileLayout(1, SIDE, SIDE)
GREEN = (0, 255, 0)


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_seeing_folder(tmp_path_factory.mktemp("models") / "seeing")


@asynccontextmanager
async def decoder(folder: Path, bounds: MediaBounds = BOUNDS) -> AsyncIterator[MediaDecoder]:
    found = MediaDecoder(folder, bounds, 1)
    try:
        yield found
    finally:
        found.close()


async def test_processes_render_and_refuse_as_the_processor_does(seeing: Path) -> None:
    rng = np.random.default_rng(3)
    picture = Image.fromarray(rng.integers(0, 256, (50, 40, 3), dtype=np.uint8))
    processor = read_media_processor(seeing)
    assert processor is not None
    async with decoder(seeing) as pool:
        found = await pool.decode(png(picture))
        assert found.layout == processor.layout(50, 40, {}) == LAYOUT
        assert found.pixels == processor.render(picture, LAYOUT).tobytes()
        with pytest.raises(InvalidArgument, match="Failed to load image"):
            await pool.decode(b"no picture")
        with pytest.raises(InvalidArgument, match=r"mm_processor_kwargs\.size: .* no such option") as refused:
            await pool.decode(plain(GREEN), MediaOptions({"size": 3}))
        assert refused.value.field == "mm_processor_kwargs"
        assert (await pool.decode(plain(GREEN))).pixels == bytes(GREEN) * SIDE * SIDE
        assert pool.num_waiting == 0


async def test_transparent_parts_get_the_colour_of_the_request(seeing: Path) -> None:
    clear = png(Image.new("RGBA", (SIDE, SIDE), (9, 9, 9, 0)))
    async with decoder(seeing) as pool:
        assert (await pool.decode(clear)).pixels[:3] == bytes((255, 255, 255))
        assert (await pool.decode(clear, MediaOptions(background=(1, 2, 3)))).pixels[:3] == bytes((1, 2, 3))
        grey = (await pool.decode(plain((255, 0, 0)), MediaOptions(image_mode="L"))).pixels[:3]
        assert len(set(grey)) == 1


async def test_a_picture_that_takes_too_long_ends_alone(seeing: Path) -> None:
    short = replace(BOUNDS, decode_s=0.05)
    slow = png(Image.new("RGB", (8000, 8000)), "PNG", compress_level=1)
    async with decoder(seeing, short) as pool:
        with pytest.raises(InvalidArgument, match=r"more than 0\.05 s"):
            await pool.decode(slow)
        assert (await pool.decode(plain(GREEN))).layout == LAYOUT


async def test_a_picture_that_takes_too_much_memory_ends_alone(seeing: Path) -> None:
    little = replace(BOUNDS, decode_bytes=96 << 20)
    async with decoder(seeing, little) as pool:
        with pytest.raises(InvalidArgument, match="too much memory"):
            await pool.decode(png(Image.new("RGB", (7900, 7900)), "PNG", compress_level=1))
        assert (await pool.decode(plain(GREEN))).layout == LAYOUT


async def test_a_killed_process_is_replaced(seeing: Path) -> None:
    async with decoder(seeing) as pool:
        await pool.decode(plain(GREEN))
        os.kill(pool.pids[0], signal.SIGKILL)
        assert (await pool.decode(plain(GREEN))).layout == LAYOUT


async def test_a_caller_that_leaves_gives_its_process_back(seeing: Path) -> None:
    async with decoder(seeing) as pool:
        await pool.decode(plain(GREEN))
        leaving = asyncio.create_task(pool.decode(png(Image.new("RGB", (3000, 3000)))))
        await loop_turns()
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        assert (await pool.decode(plain(GREEN))).layout == LAYOUT
        assert pool.num_waiting == 0


async def test_items_in_turn_are_decoded_by_the_process_that_was_started_first(seeing: Path) -> None:
    pool = MediaDecoder(seeing, BOUNDS, 3)
    try:
        await asyncio.wrap_future(pool.start())
        await loop_turns()
        (pid,) = pool.pids
        for _ in range(4):
            await pool.decode(plain(GREEN))
        assert pool.pids == [pid]
    finally:
        pool.close()
