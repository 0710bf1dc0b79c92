"""Frames of videos are read from any format, and files that are damaged, wrong or hostile are refused."""

from __future__ import annotations

import base64
import io
import os
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.services.frontend.media.decoder import MediaDecoder
from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.media.tiles import MediaTiles
from quire.services.frontend.media.videos import decode, open_video
from quire.services.frontend.request.media import NO_METADATA, MediaOptions, VideoMetadata
from quire.shared.errors import InvalidArgument
from quire.shared.media.modalities import VIDEO
from quire.shared.media.registry import read_video_processor
from quire.shared.media.video import VideoFacts, VideoProcessor
from tests.services.frontend.media.filming_folder import write_filming_folder
from tests.services.frontend.media.video_files import SIDE, animation, array, frame, frame_list, shade, sound, video

BOUNDS = MediaBounds()
NEAR = 6  # levels by which a codec may change a grey


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_filming_folder(tmp_path_factory.mktemp("models") / "filming")


@pytest.fixture(scope="module")
def processor(folder: Path) -> VideoProcessor:
    found = read_video_processor(folder)
    assert found is not None
    return found


def facts(content: bytes, bounds: MediaBounds = BOUNDS, **options: Any) -> VideoFacts:
    return open_video(content, NO_METADATA, bounds, options).facts


def greys(content: bytes, positions: list[int]) -> list[int]:
    """Returns the brightness of frames."""
    found = open_video(content, NO_METADATA, BOUNDS, {}).frames(positions)
    return [round(float(np.asarray(one).mean())) for one in found]


def assert_shades(found: list[int], indices: list[int], count: int) -> None:
    np.testing.assert_allclose(found, [shade(index, count) for index in indices], atol=NEAR)


def decoded(
    content: bytes,
    processor: VideoProcessor,
    options: Mapping[str, Any] | None = None,
    metadata: VideoMetadata = NO_METADATA,
) -> MediaTiles:
    return decode(content, options or {}, metadata, BOUNDS, processor)


def refusal(content: bytes, bounds: MediaBounds = BOUNDS, metadata: VideoMetadata = NO_METADATA) -> str:
    with pytest.raises(InvalidArgument) as refused:
        list(open_video(content, metadata, bounds, {}).frames([0]))
    return refused.value.message


@pytest.mark.parametrize(
    ("codec", "form"),
    [
        ("mpeg4", "mp4"), ("libx264", "mp4"), ("libx264", "matroska"), ("libx264", "flv"), ("libvpx-vp9", "webm"),
        ("mpeg4", "avi"), ("mpeg4", "mpegts"), ("mpeg4", "asf"), ("ffv1", "matroska"),
    ],
)  # fmt: skip
def test_frames_of_all_formats(codec: str, form: str) -> None:
    """Several of them say no number of frames in their header (vllm-omni#7373: an ASF file had 0)."""
    content = video(codec=codec, form=form)
    assert facts(content) == VideoFacts(16, 8.0, SIDE, SIDE)
    assert_shades(greys(content, [0, 7, 15]), [0, 7, 15], 16)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_animated_pictures_are_videos(kind: str) -> None:
    content = animation(kind=kind)
    assert facts(content) == VideoFacts(6, 5.0, SIDE, SIDE)
    assert_shades(greys(content, [0, 2, 5]), [0, 2, 5], 6)


def test_a_still_picture_is_a_video_of_one_frame() -> None:
    stream = io.BytesIO()
    frame(0, 1).save(stream, "JPEG")
    assert facts(stream.getvalue()).num_frames == 1
    assert_shades(greys(stream.getvalue(), [0]), [0], 1)


def test_rates_that_are_no_whole_numbers_and_times_that_vary() -> None:
    assert facts(video(fps=Fraction(30_000, 1001))).fps == pytest.approx(29.97, abs=0.001)
    uneven = video(8, form="matroska", times=[0, 10, 20, 500, 600, 1000, 1500, 4000])
    assert facts(uneven) == VideoFacts(8, 1.75, SIDE, SIDE), "7 steps in 4 s, whatever the header says"
    assert_shades(greys(uneven, [0, 3, 7]), [0, 3, 7], 8)


def test_one_frame_and_few_frames(processor: VideoProcessor) -> None:
    """vllm#48332: ultra-short videos are valid."""
    for count, taken in ((1, 1), (2, 2), (3, 2), (5, 4)):
        tiles = decoded(video(count), processor)
        assert tiles.layout.num_tiles == taken
        assert tiles.layout.numbers[0] == -(-taken // 2)


def test_more_frames_than_there_are_take_all(processor: VideoProcessor) -> None:
    """lmms-eval#874: 16 frames of a video of 9 were an error."""
    assert decoded(video(9), processor, {"num_frames": 16}).layout.num_tiles == 8
    assert decoded(video(9), processor, {"fps": 100}).layout.num_tiles == 8


def test_frames_by_number_and_by_rate(processor: VideoProcessor) -> None:
    """vllm#35909: num_frames failed because the processor has a rate by default, and both exclude each other."""
    content = video(32)  # 4 s
    assert decoded(content, processor).layout.num_tiles == 8
    assert decoded(content, processor, {"num_frames": 6}).layout.num_tiles == 6
    assert decoded(content, processor, {"fps": 1}).layout.num_tiles == 4
    assert decoded(content, processor, {"fps": 4, "num_frames": 10}).layout.num_tiles == 10
    tiles = decoded(content, processor, {"do_sample_frames": False})
    assert tiles.layout.num_tiles == 32
    levels = np.frombuffer(tiles.pixels, np.uint8).reshape(32, -1).mean(1)
    np.testing.assert_allclose(levels, [shade(index, 32) for index in range(32)], atol=NEAR)


def test_the_positions_in_time_are_those_of_the_frames_that_were_taken(processor: VideoProcessor) -> None:
    """LlamaFactory#6860: a bound on frames lowers their rate; positions were computed from the rate asked for."""
    content = video(32)  # 4 s, two positions a second
    assert decoded(content, processor).layout.numbers[3:] == (0, 2, 4, 6)
    assert decoded(content, processor, {"fps": 2, "max_frames": 4}).layout.numbers[3:] == (0, 4)


def test_wrong_options_are_named(processor: VideoProcessor) -> None:
    content = video(4)
    for options, text in (
        ({"num_frames": 0}, "num_frames is 0; a whole number above 0"),
        ({"fps": -2}, "fps is -2; a number above 0"),
        ({"fps": float("nan")}, "fps is nan"),
        ({"max_frames": 100_000}, "max_frames is 100000; at most 768"),
        ({"min_frames": 9, "max_frames": 4}, "min_frames is 9, more than max_frames, 4"),
        ({"num_frames": "8"}, "num_frames is '8'"),
        ({"do_sample_frames": 1}, "do_sample_frames is 1; true or false"),
        ({"crop": True}, "mm_processor_kwargs.crop: this model's processor has no such option"),
        ({"size": {"height": 3}}, "size is {'height': 3}"),
    ):
        with pytest.raises(InvalidArgument, match=re.escape(text)):
            decoded(content, processor, options)


def test_broken_frames_are_replaced_and_too_many_refused() -> None:
    """vllm#20313: one frame that could not be decoded was an internal error."""
    clean = video(40, codec="libvpx-vp9", form="webm", g="1")  # each frame by itself
    indices = list(range(40))
    assert_shades(greys(clean, indices), indices, 40)
    found = greys(_with_broken(clean, {17}), indices)
    assert_shades(found, [*range(17), 16, *range(18, 40)], 40)
    assert_shades(greys(_with_broken(clean, {0}), indices), [1, *range(1, 40)], 40)
    with pytest.raises(InvalidArgument, match="5 of 40 frames cannot be decoded; the file is damaged"):
        greys(_with_broken(clean, {3, 4, 9, 20, 39}), indices)
    assert "none of its frames can be decoded" in refusal(_with_broken(clean, set(indices)))


def _with_broken(content: bytes, numbers: set[int]) -> bytes:
    """Returns a file of a video with the packets of some frames overwritten."""
    av = pytest.importorskip("av")
    broken = bytearray(content)
    with av.open(io.BytesIO(content)) as container:
        packets = [packet for packet in container.demux(video=0) if packet.size]
        for number in numbers:
            at = content.index(bytes(packets[number]))
            broken[at : at + packets[number].size] = b"\xff" * packets[number].size
    return bytes(broken)


def test_a_file_that_is_cut_off_is_refused_if_its_header_tells(tmp_path: Path) -> None:
    content = video(40, movflags="faststart", path=tmp_path / "index-first.mp4")
    assert re.search(r"it is cut off: \d+ of 40 frames are there", refusal(content[: len(content) - 600]))
    assert "damaged, cut off, or no video" in refusal(video(40)[:-300]), "the index is at the end"


def test_a_header_with_one_frame_too_many() -> None:
    """torchcodec#1363: the last frame that the header announces is not there."""
    content = bytearray(video(12, form="avi"))
    at = content.index(b"avih") + 8 + 16  # total frames of the main header
    assert int.from_bytes(content[at : at + 4], "little") == 12
    at = content.index(b"strh") + 8 + 32  # length of the stream
    content[at : at + 4] = (13).to_bytes(4, "little")
    assert facts(bytes(content)).num_frames == 12
    assert_shades(greys(bytes(content), [11]), [11], 12)


def test_sound_alone_is_no_video() -> None:
    assert refusal(sound()) == "Failed to load video: it has no video, only sound or pictures of its cover"


@pytest.mark.parametrize("content", [b"", b"x" * 1000, b"\0" * 4096, b"<html></html>", b"%PDF-1.7"])
def test_other_files_are_refused(content: bytes) -> None:
    assert "Failed to load video: the file is damaged, cut off, or no video" in refusal(content)


def test_playlists_cannot_name_other_files(tmp_path: Path) -> None:
    """A demuxer of FFmpeg that reads playlists would open any file or URL for a client."""
    target = tmp_path / "secret.ts"
    target.write_bytes(video(form="mpegts"))
    for playlist in (
        f"#EXTM3U\n#EXT-X-TARGETDURATION:2\n#EXTINF:2,\nfile://{target}\n#EXT-X-ENDLIST\n",
        f"ffconcat version 1.0\nfile {target}\n",
        f"concat:{target}",
    ):
        assert "no video" in refusal(playlist.encode())


def test_bounds_are_checked_before_frames_are_decoded() -> None:
    content = video(40, size=(64, 128))
    assert "it has more than 39 frames" in refusal(content, replace(BOUNDS, frames=39))
    assert "it lasts 5 s; at most 4 s are read" in refusal(content, replace(BOUNDS, video_s=4.0))
    assert "Image dimensions 128x64 (8192 pixels) exceed" in refusal(content, replace(BOUNDS, pixels=8000))
    assert "it has 6 frames or more" in refusal(animation(), replace(BOUNDS, frames=5))
    assert "Image dimensions 64x64" in refusal(animation(), replace(BOUNDS, side=63))
    assert "Image dimensions 64x64" in refusal(array(), replace(BOUNDS, side=63))


def test_a_video_of_a_phone_is_turned() -> None:
    """The file says by which angle frames are shown, and what they measure is that of the turned ones."""
    content = bytearray(video(4, size=(32, 64)))
    at = content.index(b"tkhd") + 4 + 40  # the matrix of the track's header
    quarter = (0, 1 << 16, 0, -(1 << 16) & 0xFFFFFFFF, 0, 0, 0, 0, 1 << 30)
    content[at : at + 36] = b"".join(number.to_bytes(4, "big") for number in quarter)
    assert facts(bytes(content))[2:] == (64, 32)
    (shown,) = open_video(bytes(content), NO_METADATA, BOUNDS, {}).frames([1])
    assert shown.size == (32, 64)


def test_frames_as_pictures_in_base64(processor: VideoProcessor) -> None:
    """vllm#37301: frames without metadata were refused; vllm#40133: with metadata they keep their times."""
    content = frame_list(5).split(",", 1)[1].encode()
    tiles = decoded(content, processor)
    assert (tiles.layout.num_tiles, tiles.layout.numbers[3:]) == (5, (0, 2, 4)), "two frames a second"
    metadata = VideoMetadata(10.0, 100, (0, 20, 40, 60, 80))
    assert decoded(content, processor, metadata=metadata).layout.numbers[3:] == (0, 8, 16)
    assert decoded(content, processor, metadata=VideoMetadata(duration=5.0)).layout.numbers[3:] == (0, 4, 8)
    assert decoded(content, processor, {"fps": 1}).layout.numbers[3:] == (0, 4, 8), "the rate of the frames"
    assert decoded(content, processor, {"num_frames": 2}).layout.num_tiles == 2
    for wrong, text in (
        (VideoMetadata(frames_indices=(1, 2)), "frames_indices has 2 numbers for 5 frames"),
        (VideoMetadata(frames_indices=(4, 3, 2, 1, 0)), "ascending"),
        (VideoMetadata(None, 3, (0, 1, 2, 3, 4)), "total_num_frames is 3, and frames_indices has 4"),
    ):
        assert text in refusal(content, metadata=wrong)
    damaged = base64.b64encode(b"\xff\xd8\xff" + bytes(60))
    with pytest.raises(InvalidArgument, match="Failed to load image: it is none of PNG"):
        greys(b",".join((content, damaged)), [5])


def test_frames_as_arrays(processor: VideoProcessor) -> None:
    tiles = decoded(array(6), processor)
    assert tiles.layout.num_tiles == 6
    levels = np.frombuffer(tiles.pixels, np.uint8).reshape(6, -1).mean(1)
    assert levels.tolist() == [shade(index, 6) for index in range(6)]
    assert "the array is damaged" in refusal(array()[:-1])
    for values in (np.zeros((2, 8, 8)), np.zeros((2, 8, 8, 3), np.float32), np.zeros((0, 8, 8, 3), np.uint8)):
        stream = io.BytesIO()
        np.save(stream, values)
        assert "[num_frames, height, width, 3] of type uint8 is needed" in refusal(stream.getvalue())
    stream = io.BytesIO()
    np.save(stream, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    assert "Failed to load video" in refusal(stream.getvalue()), "nothing is unpickled"


def test_many_frames_are_bounded(processor: VideoProcessor) -> None:
    stream = io.BytesIO()
    np.save(stream, np.zeros((769, 8, 8, 3), np.uint8))
    with pytest.raises(InvalidArgument, match="769 frames are to be taken, of at most 768"):
        decoded(stream.getvalue(), processor)
    assert decoded(stream.getvalue(), processor, {"num_frames": 8}).layout.num_tiles == 8


@asynccontextmanager
async def decoder(folder: Path, bounds: MediaBounds = BOUNDS) -> AsyncIterator[MediaDecoder]:
    found = MediaDecoder(folder, bounds, 1)
    try:
        yield found
    finally:
        found.close()


async def test_processes_decode_videos_and_survive_them(folder: Path, processor: VideoProcessor) -> None:
    content = video(16)
    async with decoder(folder) as pool:
        found = await pool.decode(content, MediaOptions(video={"num_frames": 4}), VIDEO)
        assert found == decoded(content, processor, {"num_frames": 4})
        assert "0x" not in await _refused(pool, b"\0\0\0\x18ftypisom" + os.urandom(500))
        frames = await pool.decode(array(3), MediaOptions(), VIDEO, VideoMetadata(4.0, 9, (0, 4, 8)))
        assert frames.layout.numbers[3:] == (0, 3)
        stream = io.BytesIO()
        Image.new("RGB", (8, 8)).save(stream, "PNG")
        assert (await pool.decode(stream.getvalue())).layout.num_tiles == 1, "pictures as before"
    async with decoder(folder, replace(BOUNDS, video_decode_s=0.01)) as pool:
        big = video(200, codec="libx264", size=(360, 640))
        text = await _refused(pool, big)
        assert text == "Failed to load video: decoding it takes more than 0.01 s. Send a shorter or smaller one."


async def _refused(pool: MediaDecoder, content: bytes) -> str:
    with pytest.raises(InvalidArgument) as refused:
        await pool.decode(content, modality=VIDEO)
    return refused.value.message
