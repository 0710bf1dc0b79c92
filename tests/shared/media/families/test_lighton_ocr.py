"""LightOnOCR's pages become the tokens and pixels of transformers' processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LightOnOcrProcessor
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from quire.shared.errors import InvalidArgument
from tests.shared.media.families.tiled import byte_tokenizer, expanded, noise, normalized, opened, written

NAMES = {"image_token": "<|image_pad|>", "image_break_token": "<break>", "image_end_token": "<end>"}
TOKENIZER = byte_tokenizer(list(NAMES.values()), extra_special_tokens=NAMES)
IMAGE = TOKENIZER.encode("<|image_pad|>")[0]
CONFIG = {
    "model_type": "lighton_ocr", "image_token_id": IMAGE, "spatial_merge_size": 2,
    "vision_config": {"model_type": "pixtral", "patch_size": 14},
}  # fmt: skip
SIZES = [(64, 64), (65, 64), (480, 640), (641, 179), (90, 300), (127, 128)]  # height, width


@pytest.mark.parametrize("unit", [28, 14])
@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_tokens_are_those_of_transformers(size: tuple[int, int], unit: int, tmp_path: Path) -> None:
    settings = {"size": {"longest_edge": 200}, "patch_size": {"height": unit, "width": unit}, "resample": 3}
    theirs = LightOnOcrProcessor(PixtralImageProcessorPil(**settings), TOKENIZER.whole)
    wanted = theirs(images=[noise(*size)], text="a<|image_pad|>b", return_tensors="np")
    processor = opened(written(tmp_path, CONFIG, settings))
    layout = processor.layout(*size, {})
    np.testing.assert_allclose(normalized(processor, noise(*size), layout), wanted["pixel_values"], atol=1e-5)
    tokens, positions = expanded(processor, TOKENIZER.encode("a<|image_pad|>b"), [layout], TOKENIZER)
    assert tokens == wanted["input_ids"][0].tolist()
    assert positions == [index for index, token in enumerate(tokens) if token == IMAGE]


@pytest.mark.parametrize(
    ("settings", "text"),
    [({"patch_size": 0.5}, "patch_size is 0.5"), ({"patch_size": {"height": 14, "width": 28}}, "two equal ones")],
)
def test_files_that_do_not_fit_are_refused(settings: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, CONFIG, settings))


def test_a_page_that_is_too_small_is_refused(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, {"patch_size": 14}))
    with pytest.raises(InvalidArgument, match="10 x 90 pixels becomes 14 x 98, and the model needs at least 28"):
        processor.layout(10, 90, {})
