"""Conversion of the pictures that Python programs have (Pillow's images, arrays, paths, URLs, files in
memory) to messages."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from quire.media_sources import FIELD, source_part
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from PIL import Image

PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})  # Pillow's, which PNG stores unchanged
CHANNELS = (1, 3, 4)
PIL_PARTS = ("image_pil", "image")  # types of parts of messages with an image object, in vLLM and transformers
URL_PARTS = ("image_url", "input_image")


def is_part(part: Mapping[str, Any]) -> bool:
    """Returns whether a part of a message is a picture, also without a type."""
    return part.get("type") in (*PIL_PARTS, *URL_PARTS) or "image_url" in part


def message_part(part: Mapping[str, Any]) -> pb.MediaPart:
    """Returns the picture of a part: of a type of PIL_PARTS with what media_part() takes, or image_url. Raises
    InvalidArgument for a value that is no picture."""
    kind = part.get("type")
    picture = part.get(kind) if kind in PIL_PARTS else part.get("image_url")
    if isinstance(picture, Mapping):
        picture = picture.get("url")
    return media_part(picture, part.get("uuid"))


def media_part(picture: Any, name: str | None = None) -> pb.MediaPart:
    """Returns the message for one picture. `name`: under which the frontend keeps it; without `picture`, that of an
    earlier one. Raises InvalidArgument for values that are no picture, and if both are missing."""
    return source_part(picture, name, _file)


def _file(picture: Any) -> bytes:
    """Returns an image or an array as a PNG file. Raises InvalidArgument for other types."""
    if hasattr(picture, "getexif"):
        return _png(picture)
    if hasattr(picture, "__array__"):
        return _png(_from_array(picture))
    raise InvalidArgument(
        f"{FIELD}: a picture must be an image of Pillow, an array, a path, a URL or bytes, got "
        f"{type(picture).__name__}",
        field=FIELD,
    )


def _png(image: Image.Image) -> bytes:
    """Returns an image as a PNG file, with its EXIF data, so that it is turned as the same file would be."""
    stored = image if image.mode in PNG_MODES else image.convert("RGB")
    stream = io.BytesIO()
    stored.save(stream, "PNG", compress_level=1, exif=image.getexif())
    return stream.getvalue()


def _from_array(array: Any) -> Image.Image:
    """Returns an array of pixels as an image: [height, width], [height, width, channels] or [channels, height, width],
    8-bit, or floating point from 0 to 1. Raises InvalidArgument for other shapes and types."""
    import numpy as np
    from PIL import Image

    values = np.asarray(array)
    if values.ndim == 3 and values.shape[2] not in CHANNELS and values.shape[0] in CHANNELS:
        values = values.transpose(1, 2, 0)
    if np.issubdtype(values.dtype, np.floating) and values.size and values.min() >= 0.0 and values.max() <= 1.0:
        values = (values * 255.0 + 0.5).astype(np.uint8)
    is_picture = values.ndim == 2 or (values.ndim == 3 and values.shape[2] in CHANNELS)
    if not is_picture or values.dtype != np.uint8:
        raise InvalidArgument(
            f"{FIELD}: an array of shape {values.shape} and type {values.dtype} is not a picture; send "
            "[height, width, 3] of type uint8, or of floating point from 0 to 1",
            field=FIELD,
        )
    return Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values)
