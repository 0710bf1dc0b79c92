"""Pictures of LLaVA-NeXT and LLaVA-OneVision become the tokens and pixels of transformers' processors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import LlavaNextProcessor, LlavaOnevisionProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil

from quire.shared.errors import InvalidArgument
from quire.shared.media.families.llava_next import best_canvas
from tests.shared.media.families.tiled import SIZES, byte_tokenizer, expanded, noise, normalized, opened, written

SIDE = 56
TOKENIZER = byte_tokenizer(["<image>", "<video>"])
IMAGE = TOKENIZER.encode("<image>")[0]
TOWER = {"image_size": SIDE, "patch_size": 14}
NEXT_CANVASES = [[56, 112], [112, 56], [112, 112], [168, 56], [56, 168]]
NEXT = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}, "resample": 3}
GRID = [[SIDE * rows, SIDE * columns] for rows in range(1, 5) for columns in range(1, 5)]
ONEVISION = {"size": {"height": SIDE, "width": SIDE}, "resample": 3, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
CONFIGS: dict[str, dict[str, Any]] = {
    "llava_next": {"image_token_index": IMAGE, "image_grid_pinpoints": NEXT_CANVASES, "vision_config": TOWER},
    "llava_onevision": {
        "image_token_index": IMAGE, "image_grid_pinpoints": GRID, "vision_config": TOWER,
        "vision_aspect_ratio": "anyres_max_4",
    },
}  # fmt: skip
PICTURES = {
    "llava_next": {**NEXT, "image_grid_pinpoints": NEXT_CANVASES},
    "llava_onevision": {**ONEVISION, "image_grid_pinpoints": GRID},
}
FAMILIES = list(CONFIGS)


def reference(family: str) -> Any:
    """Returns the processor of transformers; that of LLaVA-OneVision has no video processor, which requires
    torchvision, and only computes the texts of pictures."""
    if family == "llava_next":
        pictures = LlavaNextImageProcessorPil(**PICTURES[family])
        return LlavaNextProcessor(
            pictures, TOKENIZER.whole, patch_size=14, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        )  # fmt: skip
    found = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    found.image_processor = LlavaOnevisionImageProcessorPil(**PICTURES[family])
    found.num_image_tokens, found.image_token, found.vision_feature_select_strategy = 16, "<image>", "full"
    found.vision_aspect_ratio = "anyres_max_4"
    return found


def computed(family: str, pictures: Sequence[Image.Image], text: str) -> tuple[Any, list[int]]:
    """Returns the pixels of each picture, padded to the most tiles, and the tokens that transformers computes."""
    theirs = reference(family)
    if family == "llava_next":
        found = theirs(images=list(pictures), text=text)
        return found["pixel_values"], list(found["input_ids"][0])
    found = theirs.image_processor(list(pictures))
    for index in range(len(pictures)):
        replacement = theirs.replace_image_token(found, index).replace("<image>", "<video>")
        text = text.replace("<image>", replacement, 1)
    return found["pixel_values"], TOKENIZER.encode(text.replace("<video>", "<image>"))


def processor_of(family: str, folder: Path, **changes: Any) -> Any:
    return opened(written(folder, {"model_type": family, **CONFIGS[family], **changes}, PICTURES[family], TOKENIZER))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_pixels_and_tokens_are_those_of_transformers(family: str, size: tuple[int, int], tmp_path: Path) -> None:
    picture, text = noise(*size), "a<image>\nb"
    pixels, wanted = computed(family, [picture], text)
    processor = processor_of(family, tmp_path)
    layout = processor.layout(*size, {})
    np.testing.assert_allclose(normalized(processor, picture, layout), pixels[0], atol=1e-5)
    tokens, positions = expanded(processor, TOKENIZER.encode(text), [layout], TOKENIZER)
    assert tokens == wanted
    assert positions == [index for index, token in enumerate(tokens) if token == IMAGE]


@pytest.mark.parametrize("family", FAMILIES)
def test_several_pictures(family: str, tmp_path: Path) -> None:
    pictures, text = [noise(*size) for size in SIZES[1:5]], "<image><image> and <image>\n<image>?"
    padded, wanted = computed(family, pictures, text)
    processor = processor_of(family, tmp_path)
    layouts = [processor.layout(*size, {}) for size in SIZES[1:5]]
    for picture, layout, pixels in zip(pictures, layouts, padded, strict=True):
        np.testing.assert_allclose(normalized(processor, picture, layout), pixels[: layout.num_tiles], atol=1e-5)
        assert not pixels[layout.num_tiles :].any()  # padding of transformers
    assert expanded(processor, TOKENIZER.encode(text), layouts, TOKENIZER)[0] == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_any_size_has_the_tokens_of_transformers(family: str, tmp_path: Path) -> None:
    processor, theirs, tile = processor_of(family, tmp_path), reference(family), [[np.empty((3, SIDE, SIDE))]]
    rng = np.random.default_rng(1)
    for height, width in [*rng.integers(1, 1500, (500, 2)).tolist(), (1, 3000), (3000, 1)]:
        found = {"image_sizes": [(height, width)], "pixel_values": tile, "batch_num_images": [1]}
        wanted = theirs.replace_image_token(found, 0).count("<image>")
        expansion = processor.expand(processor.layout(height, width, {}), TOKENIZER)
        assert expansion.num_embeddings == wanted <= processor.max_embeddings


def test_the_published_sizes(tmp_path: Path) -> None:
    """Tokens of LLaVA-NeXT for 336 x 336 pixels and of LLaVA-OneVision for 2304 x 2304."""
    tower = {"image_size": 336, "patch_size": 14}
    pictures = {"size": {"shortest_edge": 336}, "crop_size": {"height": 336, "width": 336}}
    following = opened(written(tmp_path, {"model_type": "llava_next", "vision_config": tower}, pictures))
    assert following.expand(following.layout(336, 336, {}), TOKENIZER).num_embeddings == 1176
    tower = {"image_size": 384, "patch_size": 14}
    pictures = {"size": {"height": 384, "width": 384}}
    latest = opened(written(tmp_path, {"model_type": "llava_onevision", "vision_config": tower}, pictures))
    assert latest.expand(latest.layout(2304, 2304, {}), TOKENIZER).num_embeddings == 729 + 81 * 82


def test_equal_canvases_the_first_is_taken() -> None:
    assert best_canvas(10, 10, [(20, 40), (40, 20), (20, 20)]) == (20, 20)
    assert best_canvas(10, 10, [(20, 40), (40, 20)]) == (20, 40)


@pytest.mark.parametrize(
    ("family", "changes", "text"),
    [
        ("llava_next", {"image_grid_pinpoints": [[56, 56]]}, "image_grid_pinpoints in preprocessor_config.json and"),
        ("llava_next", {"vision_config": {"image_size": 28}}, "tiles have 56 x 56 pixels"),
        ("llava_onevision", {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad'"),
        ("llava_onevision", {"vision_aspect_ratio": "anyres_max_0"}, "vision_aspect_ratio is"),
    ],
)
def test_files_that_do_not_fit_are_refused(family: str, changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=text):
        processor_of(family, tmp_path, **changes)


@pytest.mark.parametrize("canvas", [[57, 56], [0, 56], [56], "56x56", [56 << 20, 56]])
def test_canvases_that_tiles_do_not_fill_are_refused(canvas: object, tmp_path: Path) -> None:
    config = {"model_type": "llava_next", "vision_config": TOWER}
    with pytest.raises(InvalidArgument, match="image_grid_pinpoints has"):
        opened(written(tmp_path, config, {**NEXT, "image_grid_pinpoints": [canvas]}))


def test_options_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="image_grid_pinpoints: this model's processor has no such option"):
        processor_of("llava_next", tmp_path).layout(56, 56, {"image_grid_pinpoints": [[56, 56]]})
