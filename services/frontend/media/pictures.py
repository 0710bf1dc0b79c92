"""Decoding of picture files to RGB images, in all formats that are accepted.

Runs in a decoder process (decoder_process.py). Orientation from EXIF is applied; transparency is blended on a colour,
white by default; palettes, 16-bit, grey, CMYK and floating-point pictures become 8-bit RGB; of an animation the first
frame is taken.
"""

from __future__ import annotations

import io
import warnings
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from quire.services.frontend.media.policy import MediaBounds
from quire.services.frontend.request.media import WHITE
from quire.shared.errors import InvalidArgument

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")  # JPEG 2000, EPS and PSD have had worse decoders
SIXTEEN_BITS = frozenset({"I;16", "I;16L", "I;16B", "I;16N"})
# Errors by which Pillow reports damaged files.
FAILURES = (
    OSError,
    ValueError,
    SyntaxError,
    TypeError,
    EOFError,
    IndexError,
    KeyError,
    OverflowError,
    ZeroDivisionError,
)


class Colours(NamedTuple):
    """How the colours of a file become RGB."""

    mode: str = "RGB"  # mode of Pillow that the picture is reduced to first
    background: tuple[int, int, int] = WHITE  # behind transparent parts


PLAIN = Colours()


def decode(content: bytes, bounds: MediaBounds, colours: Colours = PLAIN) -> Image.Image:
    """Decodes a file to an RGB picture.

    Raises InvalidArgument for other formats, damaged files and sizes beyond the bounds; its text never repeats the
    decoder's own, which may hold memory addresses.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    Image.MAX_IMAGE_PIXELS = None  # check_dimensions() bounds them instead
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(content), formats=FORMATS) as image:
                check_dimensions(*image.size, bounds)
                return to_rgb(image, colours)
        except UnidentifiedImageError:
            raise _refused(f"it is none of {', '.join(FORMATS)}; convert it to one of them") from None
        except Image.DecompressionBombError:
            raise _refused("it is larger than its header says; save it again") from None
        except FAILURES:
            raise _refused("the file is damaged or cut off; send the complete file") from None


def check_dimensions(width: int, height: int, bounds: MediaBounds) -> None:
    """Raises InvalidArgument for a picture, or a frame of a video, that is too large, which its header says before
    anything is decoded."""
    if width * height > bounds.pixels or max(width, height) > bounds.side:
        raise InvalidArgument(
            f"Image dimensions {width}x{height} ({width * height} pixels) exceed the maximum of {bounds.pixels} pixels "
            f"and {bounds.side} on a side. Send a smaller picture.",
            field="messages",
        )
    if width == 0 or height == 0:
        raise _refused(f"it has no pixels: its dimensions are {width}x{height}")


def to_rgb(image: Image.Image, colours: Colours) -> Image.Image:
    """Returns the picture turned as its EXIF says, in 8-bit RGB; 16-bit and float values are scaled, transparent parts
    have the background's colour."""
    image.load()
    if image.mode in SIXTEEN_BITS:
        image = _eight_bits(image, 65535.0)
    elif image.mode in {"I", "F"}:
        image = _eight_bits(image, 65535.0 if image.mode == "I" else 1.0)
    turned = ImageOps.exif_transpose(image)
    if (turned.mode == "P" and "transparency" in turned.info) or turned.mode in {"LA", "PA", "La", "RGBa"}:
        turned = turned.convert("RGBA")
    if turned.mode == "RGBA":
        background = Image.new("RGBA", turned.size, (*colours.background, 255))
        turned = Image.alpha_composite(background, turned)
    return turned.convert("RGB").convert(colours.mode).convert("RGB")


def _eight_bits(image: Image.Image, most: float) -> Image.Image:
    """Returns a grey 8-bit image, its values scaled from [0, most] to [0, 255]; values out of range are clipped, and
    NaN becomes black. Keeps the EXIF data."""
    values = np.nan_to_num(np.asarray(image, dtype=np.float64), nan=0.0, posinf=most, neginf=0.0)
    scaled = Image.fromarray((values.clip(0.0, most) * (255.0 / most) + 0.5).astype(np.uint8), "L")
    scaled.info, exif = dict(image.info), image.getexif()
    if exif:
        scaled.getexif().update(exif)
    return scaled


def _refused(reason: str) -> InvalidArgument:
    return InvalidArgument(f"Failed to load image: {reason}", field="messages")
