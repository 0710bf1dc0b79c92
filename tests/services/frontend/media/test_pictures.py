"""Pictures of every kind become the RGB that a viewer shows; damaged and hostile files are refused in one line."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.services.frontend.media.pictures import decode
from quire.services.frontend.media.policy import MediaBounds
from quire.shared.errors import InvalidArgument

BOUNDS = MediaBounds()
ORIENTATION = 0x0112  # tag of EXIF
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def corners() -> Image.Image:
    """4 x 2 pixels: red at the upper left, blue at the lower right, else green."""
    image = Image.new("RGB", (4, 2), GREEN)
    image.putpixel((0, 0), RED)
    image.putpixel((3, 1), BLUE)
    return image


def rgb(content: bytes) -> np.ndarray:
    return np.asarray(decode(content, BOUNDS))


def refusal(content: bytes, bounds: MediaBounds = BOUNDS) -> str:
    with pytest.raises(InvalidArgument) as refused:
        decode(content, bounds)
    assert " at 0x" not in refused.value.message
    return refused.value.message


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "GIF"])
def test_lossless_kinds_keep_every_pixel(kind: str) -> None:
    assert (rgb(saved(corners(), kind)) == np.asarray(corners())).all()


@pytest.mark.parametrize("kind", ["JPEG", "WEBP", "AVIF"])
def test_lossy_kinds_keep_the_picture(kind: str) -> None:
    plain = Image.new("RGB", (64, 48), (200, 30, 60))
    found = rgb(saved(plain, kind, quality=95)).astype(int)
    assert found.shape == (48, 64, 3)
    assert abs(found - np.asarray(plain).astype(int)).max() <= 8


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["PNG", "WEBP", "TIFF"])
def test_the_orientation_of_exif_is_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    shown = np.asarray(corners())
    turned = {
        1: shown, 2: shown[:, ::-1], 3: shown[::-1, ::-1], 4: shown[::-1],
        5: shown.swapaxes(0, 1), 6: np.rot90(shown, -1), 7: np.rot90(shown, -1)[::-1, :][:, :], 8: np.rot90(shown, 1),
    }  # fmt: skip
    if orientation == 7:
        turned[7] = shown[::-1, ::-1].swapaxes(0, 1)
    found = rgb(saved(corners(), kind, exif=exif.tobytes() if kind != "TIFF" else exif, **options))
    assert found.shape == turned[orientation].shape
    assert (found == turned[orientation]).all()


def test_transparency_is_blended_on_white() -> None:
    image = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    image.putpixel((1, 0), (255, 0, 0, 128))
    left, right = rgb(saved(image))[0]
    assert tuple(left) == (255, 255, 255)
    assert abs(right.astype(int) - np.array([255, 127, 127])).max() <= 1


def test_palettes_with_and_without_transparency() -> None:
    palette = corners().convert("P", palette=Image.Palette.ADAPTIVE)
    assert (rgb(saved(palette)) == np.asarray(palette.convert("RGB"))).all()
    clear = palette.getpixel((1, 0))
    found = rgb(saved(palette, transparency=clear))
    assert tuple(found[0, 1]) == (255, 255, 255)
    assert tuple(found[0, 0]) == RED


@pytest.mark.parametrize("mode", ["1", "L", "LA"])
def test_grey_pictures(mode: str) -> None:
    image = Image.new(mode, (3, 2), (255, 255) if mode == "LA" else 255)
    assert (rgb(saved(image)) == 255).all()


def test_sixteen_bits_are_scaled_and_not_cut_off() -> None:
    values = np.array([[0, 32768, 65535]], dtype=np.uint16)
    assert rgb(saved(Image.fromarray(values)))[0, :, 0].tolist() == [0, 128, 255]


def test_floating_point_pictures() -> None:
    values = np.array([[0.0, 0.5, 1.0, 7.0, -1.0, np.nan, np.inf]], dtype=np.float32)
    assert rgb(saved(Image.fromarray(values), "TIFF"))[0, :, 0].tolist() == [0, 128, 255, 255, 0, 0, 255]


def test_cmyk() -> None:
    found = rgb(saved(Image.new("CMYK", (16, 16), (0, 255, 255, 0)), "JPEG", quality=100))
    assert abs(found.astype(int) - np.array(RED)).max() <= 4


def test_an_animation_shows_its_first_frame() -> None:
    frames = [Image.new("RGB", (4, 4), colour) for colour in (RED, GREEN, BLUE)]
    for kind in ("GIF", "PNG", "WEBP"):
        options: dict[str, Any] = {"lossless": True} if kind == "WEBP" else {}
        content = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert (rgb(content) == RED).all(), kind


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_a_file_that_is_cut_off_anywhere_is_refused_or_whole(kind: str) -> None:
    rng = np.random.default_rng(1)
    content = saved(Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8)), kind)
    for end in range(0, len(content) - len(content) // 8, 37):
        assert refusal(content[:end]).startswith("Failed to load image: ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"<html>Not found</html>",
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
        b"\x00\x00\x00\x0cjP  \r\n\x87\n",  # JPEG 2000, CVE-2026-22778
        bytes(1000),
    ],
)
def test_what_is_no_picture_is_refused(content: bytes) -> None:
    assert refusal(content).startswith("Failed to load image: ")


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(width: int, height: int, data: bytes, *more: bytes) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + b"".join(more) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def test_a_bomb_is_refused_by_its_header() -> None:
    assert "Image dimensions 50000x50000 (2500000000 pixels)" in refusal(png(50_000, 50_000, zlib.compress(b"")))
    assert "and 32768 on a side" in refusal(png(1_000_000, 1, zlib.compress(b"")))


def test_a_bomb_in_a_text_chunk_is_refused() -> None:
    bomb = chunk(b"zTXt", b"Comment\0\0" + zlib.compress(bytes(200 << 20)))
    refusal(png(1, 1, zlib.compress(bytes(4)), bomb))
