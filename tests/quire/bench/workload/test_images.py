"""Pictures of a workload are PNG files that a decoder reads, the same at every run and different between requests."""

from __future__ import annotations

import argparse
import base64
import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from quire.bench.workload import images
from quire.bench.workload.images import ImageOptions, chat_messages, image_options, png
from quire.bench.workload.workloads import BenchRequest
from quire.shared.errors import InvalidArgument


def options(*flags: str) -> ImageOptions:
    parser = argparse.ArgumentParser()
    images.configure(parser)
    return image_options(parser.parse_args(flags))


def pictures(prompt: tuple[int, ...], asked: ImageOptions) -> list[np.ndarray[Any, Any]]:
    (message,) = chat_messages(BenchRequest(prompt, 8), asked)
    parts: Any = message["content"]
    found = []
    for part in parts[:-1]:
        head, _, content = part["image_url"]["url"].partition(",")
        assert head == "data:image/png;base64"
        found.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(content)))))
    assert parts[-1] == {"type": "text", "text": " ".join(str(token % 10) for token in prompt)}
    return found


def test_a_png_holds_the_pixels() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    image = Image.open(io.BytesIO(png(pixels)))
    assert (image.mode, image.size) == ("RGB", (7, 5))
    assert np.array_equal(np.asarray(image), pixels)


def test_each_request_has_its_own_pictures_at_every_run() -> None:
    asked = ImageOptions(2, 9, 4)
    first, again, other = pictures((1, 22, 3), asked), pictures((1, 22, 3), asked), pictures((1, 22, 4), asked)
    assert [each.shape for each in first] == [(4, 9, 3)] * 2
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    distinct = {each.tobytes() for each in (*first, *other)}
    assert len(distinct) == 4


def test_flags_give_number_and_size() -> None:
    assert options() == ImageOptions(0, 0, 0)
    assert options("--images", "3") == ImageOptions(3, 1280, 720)
    assert options("--images", "1", "--image-size", "448X336") == ImageOptions(1, 448, 336)


@pytest.mark.parametrize("size", ["448", "0x4", "4x99999", "axb", "4x4x4", "-4x4"])
def test_a_size_that_is_none_is_refused_by_name(size: str) -> None:
    with pytest.raises(InvalidArgument, match=r"image_size: .* for example 1280x720"):
        options("--images", "1", f"--image-size={size}")
