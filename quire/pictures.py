"""Conversion of the pictures that Python programs have (Pillow's images, arrays, paths, URLs, files in memory) to
messages."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire import sounds
from quire.shared.errors import InvalidArgument
from quire.shared.pb.inference.v1 import inference_pb2 as pb

if TYPE_CHECKING:
    from PIL import Image

URL_SCHEMES = ("data:", "http:", "https:", "file:")
PNG_MODES = frozenset({"1", "L", "LA", "I;16", "P", "RGB", "RGBA"})  # Pillow's, which PNG stores unchanged
CHANNELS = (1, 3, 4)
IMAGE = "image"
MODALITIES = (IMAGE, "audio")  # keys of multi_modal_data
PIL_PARTS = ("image_pil", "image")  # types of parts of messages with an image object, in vLLM and transformers


def of_prompt(data: Mapping[str, Any] | None, uuids: Mapping[str, Any] | None) -> list[pb.MediaPart]:
    """Returns the pictures of a prompt. `data`: multi_modal_data, `uuids`: multi_modal_uuids, both by modality. Raises
    InvalidArgument for other modalities, and for a value that is no picture."""
    given, names = _items(data, "multi_modal_data"), _items(uuids, "multi_modal_uuids")
    if names and given and len(names) != len(given):
        text = f"multi_modal_uuids has {len(names)} names for {len(given)} pictures; one for each is needed"
        raise InvalidArgument(text, field="multi_modal_uuids")
    given, names = given or [None] * len(names), names or [None] * len(given)
    return [media_part(picture, name) for picture, name in zip(given, names, strict=True)]


def _items(by_modality: Mapping[str, Any] | None, field: str) -> list[Any]:
    """Returns the pictures, or their names, in the dictionary `field` of a prompt; a single one as a list. Raises
    InvalidArgument for other modalities."""
    for modality in by_modality or ():
        if modality not in MODALITIES:
            known = ", ".join(MODALITIES)
            raise InvalidArgument(f"{field}: {modality!r} is not supported; available: {known}", field=field)
    items = (by_modality or {}).get(IMAGE)
    if items is None:
        return []
    return list(items) if isinstance(items, list | tuple) else [items]


def content_parts(content: Sequence[Any]) -> list[pb.ContentPart]:
    """Returns the parts of a message in OpenAI's form, or with Pillow's images. Raises InvalidArgument for others."""
    return [_content_part(part) for part in content]


def _content_part(part: Any) -> pb.ContentPart:
    """Converts one part. Raises InvalidArgument for a type that is neither text nor a picture nor sound."""
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    kind = part.get("type")
    if isinstance(part.get("text"), str):
        return pb.ContentPart(text=part["text"])
    if kind in PIL_PARTS:
        return pb.ContentPart(image=media_part(part.get(kind), part.get("uuid")))
    if kind in ("image_url", "input_image") or "image_url" in part:
        url = part.get("image_url")
        url = url.get("url") if isinstance(url, Mapping) else url
        return pb.ContentPart(image=media_part(url, part.get("uuid")))
    if sounds.is_part(part):
        return pb.ContentPart(audio=sounds.message_part(part))
    text = f"messages: parts of type {kind!r} are not supported; send text, images and audio"
    raise InvalidArgument(text, field="messages")


def media_part(picture: Any, name: str | None = None) -> pb.MediaPart:
    """Returns the message for one picture. `name`: under which the frontend keeps it; without `picture`, that of an
    earlier one. Raises InvalidArgument for values that are no picture, and if both are missing."""
    part = pb.MediaPart(name=name or "")
    if picture is None and name:
        return part
    if isinstance(picture, str) and picture.startswith(URL_SCHEMES):
        part.url = picture
    else:
        part.content = _content(picture)
    return part


def _content(picture: Any) -> bytes:
    """Returns the bytes of a picture's file; images and arrays become PNG files. Raises InvalidArgument for other types
    and files that cannot be read."""
    if isinstance(picture, bytes | bytearray | memoryview):
        return bytes(picture)
    if isinstance(picture, str | os.PathLike):
        return _read(Path(picture))
    if hasattr(picture, "getexif"):
        return _png(picture)
    if hasattr(picture, "__array__"):
        return _png(_from_array(picture))
    raise InvalidArgument(
        f"multi_modal_data: a picture must be an image of Pillow, an array, a path, a URL or bytes, got "
        f"{type(picture).__name__}",
        field="multi_modal_data",
    )


def _read(path: Path) -> bytes:
    """Reads a picture's file. Raises InvalidArgument if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        text = f"multi_modal_data: cannot read {str(path)!r:.200}: {error.strerror}"
        raise InvalidArgument(text, field="multi_modal_data") from None


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
            f"multi_modal_data: an array of shape {values.shape} and type {values.dtype} is not a picture; send "
            "[height, width, 3] of type uint8, or of floating point from 0 to 1",
            field="multi_modal_data",
        )
    return Image.fromarray(values[:, :, 0] if values.ndim == 3 and values.shape[2] == 1 else values)
