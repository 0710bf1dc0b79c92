"""Pictures of Idefics 3 and SmolVLM become the tokens and pixels of transformers' processors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import Idefics3Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.idefics3 import scaled_to_edge
from tests.shared.media.families.tiled import SIZES, byte_tokenizer, expanded, noise, normalized, opened, written

SIDE = 56
PICTURES = {"size": {"longest_edge": 3 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
TILES = [f"<row_{row}_col_{column}>" for row in range(1, 5) for column in range(1, 5)]
TOKENIZER = byte_tokenizer(["<fake_token_around_image>", "<image>", "<end_of_utterance>", *TILES])  # no <global-img>
IMAGE = TOKENIZER.encode("<image>")[0]
CONFIG = {
    "model_type": "idefics3", "image_token_id": IMAGE, "scale_factor": 2,
    "vision_config": {"image_size": SIDE, "patch_size": 14},
}  # fmt: skip
OPTIONS: list[dict[str, Any]] = [{}, {"do_image_splitting": False}, {"size": {"longest_edge": 2 * SIDE}}]


def reference(**changes: Any) -> Idefics3Processor:
    pictures = Idefics3ImageProcessorPil(**{**PICTURES, **changes})
    return Idefics3Processor(pictures, TOKENIZER.whole, image_seq_len=4)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("size", SIZES)
def test_pixels_and_tokens_are_those_of_transformers(
    size: tuple[int, int], options: dict[str, Any], tmp_path: Path
) -> None:
    picture, text = noise(*size), "a<image>\nb"
    wanted = reference()(images=[picture], text=text, **options)
    processor = opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER))
    layout = processor.layout(*size, options)
    np.testing.assert_allclose(normalized(processor, picture, layout), wanted["pixel_values"][0], atol=1e-5)
    tokens, positions = expanded(processor, TOKENIZER.encode(text), [layout], TOKENIZER)
    assert tokens == list(wanted["input_ids"][0])
    assert positions == [index for index, token in enumerate(tokens) if token == IMAGE]


def test_several_pictures(tmp_path: Path) -> None:
    pictures, text = [noise(*size) for size in SIZES[1:5]], "<image><image> and <image>\n<image>?"
    wanted = reference()(images=pictures, text=text)
    processor = opened(written(tmp_path, CONFIG, PICTURES, TOKENIZER))
    layouts = [processor.layout(*size, {}) for size in SIZES[1:5]]
    found = [normalized(processor, *pair) for pair in zip(pictures, layouts, strict=True)]
    np.testing.assert_allclose(np.concatenate(found), wanted["pixel_values"][0], atol=1e-5)
    assert expanded(processor, TOKENIZER.encode(text), layouts, TOKENIZER)[0] == list(wanted["input_ids"][0])


def test_smolvlm_cuts_alike(tmp_path: Path) -> None:
    processor = opened(written(tmp_path, {**CONFIG, "model_type": "smolvlm"}, PICTURES, TOKENIZER))
    for size in SIZES:
        wanted = SmolVLMImageProcessorPil(**PICTURES)([noise(*size)])["pixel_values"][0]
        layout = processor.layout(*size, {})
        np.testing.assert_allclose(normalized(processor, noise(*size), layout), wanted, atol=1e-5)


class SizesOnly(SmolVLMImageProcessorPil):
    """Processor of transformers that computes sizes and no pixels."""

    def resize(self, image: np.ndarray, size: Any, **_: Any) -> np.ndarray:
        return np.broadcast_to(np.uint8(0), (3, size.height, size.width))


def test_any_size_has_the_tiles_of_transformers(tmp_path: Path) -> None:
    """Sides as published for SmolVLM."""
    published = {"size": {"longest_edge": 2048}, "max_image_size": {"longest_edge": 512}}
    config = {**CONFIG, "scale_factor": 4, "vision_config": {"image_size": 512, "patch_size": 16}}
    processor, theirs = opened(written(tmp_path, config, published)), SizesOnly(**published)
    assert processor.max_embeddings == 17 * 64
    rng = np.random.default_rng(1)
    for height, width in rng.integers(1, 5000, (300, 2)).tolist():
        picture = np.broadcast_to(np.uint8(0), (3, *scaled_to_edge(height, width, 2048)))
        resized = theirs.resize_for_vision_encoder(picture, 512).shape[-2:]
        assert processor.layout(height, width, {}).numbers[:2] == (resized[0] // 512, resized[1] // 512)


@pytest.mark.parametrize("size", [(1, 3000), (3000, 1), (1, 1)])
def test_a_line_of_pixels_is_cut(size: tuple[int, int], tmp_path: Path) -> None:
    """transformers computes a side of no pixels for the first two."""
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    layout = processor.layout(*size, {})
    assert processor.render(noise(*size), layout).shape[0] == layout.num_tiles > 1


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"size": {"longest_edge": 4 * SIDE}}, "size.longest_edge: is 224; a whole number from 1 to 168"),
        ({"size": 56}, "size: is 56; an object"),
        ({"size": {"height": 56, "width": 56}}, "size: is .*; an object"),
        ({"do_image_splitting": 1}, "do_image_splitting: is 1; true or false"),
        ({"max_image_size": {"longest_edge": 28}}, "max_image_size: this model's processor has no such option"),
    ],
)
def test_options_are_refused_by_name(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    processor = opened(written(tmp_path, CONFIG, PICTURES))
    with pytest.raises(InvalidArgument, match=text):
        processor.layout(100, 100, options)


@pytest.mark.parametrize(
    ("pictures", "text"),
    [
        ({"max_image_size": {"longest_edge": 28}}, "tiles have 28 x 28 pixels, and vision_config.image_size is 56"),
        ({"size": {"height": 56, "width": 56}}, "size is .* is needed, from 1 to 4096"),
        ({"size": {"longest_edge": 10**6}}, "size is"),
    ],
)
def test_files_that_do_not_fit_are_refused(pictures: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        opened(written(tmp_path, CONFIG, {**PICTURES, **pictures}))
