"""Pictures come into the form that transformers' own processors give them, pixel by pixel."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

from quire.services.frontend.media.pictures import decode
from quire.services.frontend.media.policy import MediaBounds
from quire.shared.errors import InvalidArgument
from quire.shared.media.picture_sizes import read_processor
from quire.shared.media.rendering import fixed_size

CLIP = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}, "resample": 3}
SIGLIP = {
    "size": {"height": 48, "width": 64},
    "resample": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
PROCESSORS = {"clip": (CLIPImageProcessorPil, CLIP), "siglip": (SiglipImageProcessorPil, SIGLIP)}
SIZES = [(56, 56), (57, 56), (480, 640), (641, 479), (10, 300), (1000, 31), (1, 1)]


def noise(height: int, width: int) -> Image.Image:
    rng = np.random.default_rng(height * 1000 + width)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


def written(folder: Path, values: dict[str, Any], name: str = "preprocessor_config.json") -> Path:
    (folder / name).write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", PROCESSORS)
def test_pixels_are_those_of_transformers(kind: str, size: tuple[int, int], tmp_path: Path) -> None:
    make, values = PROCESSORS[kind]
    image, stream = noise(*size), io.BytesIO()
    image.save(stream, "PNG")
    processor = read_processor(written(tmp_path, values))
    pixels = fixed_size(decode(stream.getvalue(), MediaBounds()), processor.size)
    found = (pixels.astype(np.float32) * processor.factor - processor.mean) / processor.std
    expected = make(**values)(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_allclose(found.transpose(2, 0, 1), expected, atol=1e-5)


@pytest.mark.parametrize("form", [{"size": 56, "crop_size": 56}, {"size": {"shortest_edge": 56}, "crop_size": 56}])
def test_older_forms_of_the_same_size(form: dict[str, Any], tmp_path: Path) -> None:
    assert read_processor(written(tmp_path, form)).size.resize(112, 56).height == 112


def test_the_file_of_the_whole_processor_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path, {"image_processor": SIGLIP}, "processor_config.json")
    assert read_processor(folder).mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**CLIP, "do_normalize": False}, "do_normalize is false"),
        ({"size": {"longest_edge": 5}}, "do not determine one size"),
        ({**CLIP, "resample": 9}, "resample is 9"),
        ({**CLIP, "image_mean": [1, 2]}, "image_mean is"),
    ],
)
def test_other_processing_is_refused(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read_processor(written(tmp_path, values))
    with pytest.raises(InvalidArgument, match="has no preprocessor_config"):
        read_processor(tmp_path / "none")


def test_a_strip_is_refused_before_it_is_scaled(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="aspect ratio must be smaller than 200"):
        read_processor(written(tmp_path, CLIP)).size.resize(1, 30_000)
