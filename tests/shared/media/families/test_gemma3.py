"""Gemma 3: tokens and pixels are those of transformers' processor, with and without pan and scan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Gemma3Processor, PreTrainedTokenizerFast
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

from quire.shared.errors import InvalidArgument
from quire.shared.media.processor import MediaProcessor, WholeItemProcessor
from quire.shared.media.registry import read_media_processor
from tests.shared.media.families.gemma_tokenizer import SPECIAL, gemma_tokenizer
from tests.shared.media.families.prompts import expanded, noise

SETTINGS = {
    "size": {"height": 32, "width": 32}, "resample": 2, "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    "do_pan_and_scan": None, "pan_and_scan_min_crop_size": None,
}  # fmt: skip
# height, width: below and above the least ratio, wide, tall, with crops that would be too small, tiny
SIZES = [(64, 64), (300, 350), (300, 360), (300, 1300), (1000, 300), (257, 4000), (200, 900), (1, 1), (5, 1)]
PAN_AND_SCAN: list[dict[str, Any]] = [
    {"do_pan_and_scan": True},
    {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 40},
    {"do_pan_and_scan": True, "pan_and_scan_max_num_crops": 3, "pan_and_scan_min_ratio_to_activate": 3.0},
    {"do_pan_and_scan": False, "pan_and_scan_min_crop_size": 1},
]
PROMPTS = [
    "<start_of_image>",
    "user\n<start_of_image>What is it?",
    "user\n\n<start_of_image>\n\n\nWhat <start_of_image> is <start_of_image><start_of_image>\nit",
    "<start_of_image>\n<start_of_image>",
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return gemma_tokenizer()


def opened(folder: Path, tokenizer: PreTrainedTokenizerFast, **settings: Any) -> MediaProcessor:
    begin, soft, end = tokenizer.convert_tokens_to_ids(list(SPECIAL.values()))
    config = {
        "model_type": "gemma3", "mm_tokens_per_image": 4, "vision_config": {"image_size": 32},
        "boi_token_index": begin, "image_token_index": soft, "eoi_token_index": end,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    processor = read_media_processor(folder)
    assert processor is not None
    return processor


def reference(tokenizer: PreTrainedTokenizerFast) -> Gemma3Processor:
    return Gemma3Processor(Gemma3ImageProcessorPil(size=SETTINGS["size"]), tokenizer, image_seq_length=4)


@pytest.mark.parametrize("options", [{}, *PAN_AND_SCAN])
def test_pixels_and_tokens_of_pictures_of_many_sizes(
    options: dict[str, Any], tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    processor, theirs = opened(tmp_path, tokenizer), reference(tokenizer)
    for size in SIZES:
        picture = noise(*size)
        expected = theirs(images=[picture], text="user\n<start_of_image>What", return_tensors="np", **options)
        layout = processor.layout(*size, options)
        pixels = processor.render(picture, layout)
        mean, std, factor = processor.normalization
        normalized = (pixels.astype(np.float32) * factor - mean) / std
        np.testing.assert_allclose(normalized.transpose(0, 3, 1, 2), expected["pixel_values"], atol=1e-5)
        found = expanded(processor, tokenizer("user\n<start_of_image>What").input_ids, [layout], tokenizer)
        assert found.token_ids == expected["input_ids"][0].tolist(), size
        assert found.embedded == np.flatnonzero(expected["token_type_ids"][0]).tolist()
        assert len(found.embedded) == 4 * layout.num_tiles <= processor.max_embeddings
        assert isinstance(processor, WholeItemProcessor)
        assert found.ranges[0][1] <= processor.max_item_tokens


@pytest.mark.parametrize("prompt", PROMPTS)
def test_line_feeds_around_pictures_are_joined(prompt: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    processor, count = opened(tmp_path, tokenizer), prompt.count("<start_of_image>")
    expected = reference(tokenizer)(images=[[noise(40, 50)] * count], text=[prompt], return_tensors="np")
    layouts = [processor.layout(40, 50, {})] * count
    found = expanded(processor, tokenizer(prompt).input_ids, layouts, tokenizer)
    assert found.token_ids == expected["input_ids"][0].tolist()
    assert found.embedded == np.flatnonzero(expected["token_type_ids"][0]).tolist()
    ends = [0, *(offset + length for offset, length in found.ranges)]
    assert all(offset >= end for (offset, _), end in zip(found.ranges, ends, strict=False)), "ranges do not overlap"


def test_several_pictures_with_different_numbers_of_crops(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    processor, text = opened(tmp_path, tokenizer), "\n".join(["<start_of_image>"] * len(SIZES))
    pictures, options = [noise(*size) for size in SIZES], {"do_pan_and_scan": True}
    expected = reference(tokenizer)(images=[pictures], text=[text], return_tensors="np", **options)
    layouts = [processor.layout(*size, options) for size in SIZES]
    assert len({layout.num_tiles for layout in layouts}) > 2
    found = expanded(processor, tokenizer(text).input_ids, layouts, tokenizer)
    assert found.token_ids == expected["input_ids"][0].tolist()


def test_the_model_file_may_turn_crops_on_and_a_request_off(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    processor = opened(tmp_path, tokenizer, do_pan_and_scan=True, pan_and_scan_min_crop_size=100)
    assert processor.layout(300, 1300, {}).num_tiles == 5
    assert processor.layout(300, 1300, {"do_pan_and_scan": False}).num_tiles == 1


def test_a_line_of_pixels_has_no_empty_crops(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    processor, options = opened(tmp_path, tokenizer), {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 1}
    for width in range(1, 40):
        layout = processor.layout(1, width, options)
        assert processor.render(noise(1, width), layout).shape[0] == layout.num_tiles


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"min_pixels": 4}, "mm_processor_kwargs.min_pixels: .* it has do_pan_and_scan, pan_and_scan_min_crop_size"),
        ({"do_pan_and_scan": 1}, "mm_processor_kwargs.do_pan_and_scan is 1: true or false"),
        ({"pan_and_scan_min_crop_size": 0}, "pan_and_scan_min_crop_size is 0: a number of pixels from 1 on"),
        ({"pan_and_scan_max_num_crops": 5}, "pan_and_scan_max_num_crops is 5: a number of crops from 1 to 4"),
        ({"pan_and_scan_min_ratio_to_activate": "1"}, "pan_and_scan_min_ratio_to_activate is '1': a ratio"),
    ],
)
def test_options_out_of_range_are_refused_by_name(
    options: dict[str, Any], text: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(tmp_path, tokenizer).layout(300, 1300, options)


def test_files_that_do_not_fit_together(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"pictures have 48 x 48 pixels, and vision_config.image_size is 32"):
        opened(tmp_path, tokenizer, size={"height": 48, "width": 48})
    with pytest.raises(InvalidArgument, match=r"preprocessor_config.json.pan_and_scan_max_num_crops is 0"):
        opened(tmp_path, tokenizer, pan_and_scan_max_num_crops=0)
