"""Pictures in a workload's requests: random noise as PNG files in data URLs, new ones for each request."""

from __future__ import annotations

import argparse
import base64
import zlib
from dataclasses import dataclass

import numpy as np

from quire.bench.workload.noise import png
from quire.bench.workload.workloads import BenchRequest
from quire.flags.setting_flags import human_int
from quire.shared.errors import InvalidArgument

MAX_SIDE = 16_384  # pixels


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """Number and size of the pictures of every request."""

    count: int = 0
    width: int = 0
    height: int = 0


NO_IMAGES = ImageOptions()


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of pictures."""
    parser.add_argument(
        "--images",
        type=human_int,
        default=0,
        help="so many pictures of random noise with each prompt: sent over HTTP as a chat whose text is the prompt's "
        "token ids as digits",
    )
    parser.add_argument("--image-size", default="1280x720", metavar="WIDTHxHEIGHT", help="in pixels")


def image_options(arguments: argparse.Namespace) -> ImageOptions:
    """Reads the flags. Raises InvalidArgument for a size that is not WIDTHxHEIGHT."""
    if not arguments.images:
        return NO_IMAGES
    sides = arguments.image_size.lower().split("x")
    if len(sides) != 2 or not all(side.isdigit() and 1 <= int(side) <= MAX_SIDE for side in sides):
        raise InvalidArgument(
            f"image_size: {arguments.image_size!r} is not WIDTHxHEIGHT, each 1 to {MAX_SIDE}; for example 1280x720",
            field="image_size",
        )
    return ImageOptions(arguments.images, int(sides[0]), int(sides[1]))


def chat_messages(item: BenchRequest, images: ImageOptions) -> list[dict[str, object]]:
    """Returns the messages of a request with pictures, the same at every call."""
    seed = zlib.crc32(np.array(item.prompt, dtype=np.int32).tobytes())
    pixels = np.random.default_rng(seed).integers(
        0, 256, (images.count, images.height, images.width, 3), dtype=np.uint8
    )
    parts: list[dict[str, object]] = [
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png(each)).decode()}"}}
        for each in pixels
    ]
    text = " ".join(str(token % 10) for token in item.prompt)
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
