"""Videos of InternVL, SmolVLM and LLaVA-OneVision become the tokens of transformers' processors."""

from __future__ import annotations

from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import InternVLProcessor, LlavaOnevisionProcessor, SmolVLMProcessor
from transformers.video_utils import VideoMetadata

from quire.shared.media.expansion import expand_each
from quire.shared.media.families.frame_videos import in_words
from quire.shared.media.registry import read_video_processor
from quire.shared.media.video import Clip, VideoFacts
from tests.shared.media.families.tiled import byte_tokenizer, written

SIDE = 56
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
VISION = {"image_size": SIDE, "patch_size": 14}
SPECIAL = ("<video>", "<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<fake_token_around_image>", "<global-img>")
TOKENIZER = byte_tokenizer(list(SPECIAL))
INDICES = (0, 30, 61, 95)
FACTS = VideoFacts(3700, 30.0, 40, 60)


def token(text: str) -> int:
    return TOKENIZER.encode(text)[0]


def ours(folder: Path, config: dict[str, Any], values: dict[str, Any]) -> tuple[list[int], list[int]]:
    """Returns the tokens of a prompt, and the positions that take rows."""
    written(folder, config, values, TOKENIZER)
    processor = read_video_processor(folder)
    assert processor is not None
    expansion = processor.expand(processor.layout(Clip(FACTS, INDICES), {}), TOKENIZER)
    prompt = expand_each(TOKENIZER.encode("a<video>\nb"), [(processor.placeholder, expansion)])
    (item,) = prompt.items
    rows = [item.offset + start + index for start, length in item.runs for index in range(length)]
    return prompt.token_ids, rows


def test_internvl(tmp_path: Path) -> None:
    config = {"model_type": "internvl", "image_token_id": token("<IMG_CONTEXT>"), "vision_config": VISION}
    names = SimpleNamespace(start_image_token="<img>", end_image_token="</img>", image_token="<IMG_CONTEXT>")
    names.image_seq_length = 4
    text = InternVLProcessor.replace_video_token(names, {"pixel_values_videos": [np.zeros(len(INDICES))]}, 0)
    tokens, rows = ours(tmp_path, config, SQUARE)
    assert tokens == TOKENIZER.encode(f"a{text}\nb")
    assert rows == [place for place, one in enumerate(tokens) if one == token("<IMG_CONTEXT>")]


def test_smolvlm(tmp_path: Path) -> None:
    config = {"model_type": "smolvlm", "image_token_id": token("<image>"), "scale_factor": 2, "vision_config": VISION}
    values = {"size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE}}
    names = SimpleNamespace(
        image_seq_len=4, image_token="<image>", fake_image_token="<fake_token_around_image>",
        global_image_token="<global-img>",
    )  # fmt: skip
    metadata = VideoMetadata(
        total_num_frames=FACTS.num_frames, fps=FACTS.fps, duration=FACTS.num_frames / FACTS.fps,
        frames_indices=list(INDICES),
    )  # fmt: skip
    inputs = {"pixel_values": np.zeros((1, len(INDICES))), "video_metadata": [metadata]}
    theirs = SmolVLMProcessor.replace_video_token  # needs num2words, a package of its own, for which in_words() stands
    text = FunctionType(theirs.__code__, {**theirs.__globals__, "num2words": in_words})(names, inputs, 0)
    tokens, rows = ours(tmp_path, config, values)
    assert tokens == TOKENIZER.encode(f"a{text}\nb")
    assert rows == [place for place, one in enumerate(tokens) if one == token("<image>")]


def test_llava_onevision(tmp_path: Path) -> None:
    config = {
        "model_type": "llava_onevision", "image_token_index": token("<image>"), "video_token_index": token("<video>"),
        "vision_config": VISION,
    }  # fmt: skip
    names = SimpleNamespace(num_image_tokens=16, video_token="<video>")
    text = LlavaOnevisionProcessor.replace_video_token(names, {"pixel_values_videos": [np.zeros(len(INDICES))]}, 0)
    tokens, rows = ours(tmp_path, config, {**SQUARE, "image_grid_pinpoints": [[SIDE, 2 * SIDE]]})
    assert tokens == TOKENIZER.encode(f"a{text}\nb")
    assert rows == [place for place, one in enumerate(tokens) if one == token("<video>")]


def test_frames_are_scaled_as_single_pictures_are(tmp_path: Path) -> None:
    """SmolVLM scales to a longest edge first; the others at once."""
    frame = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 90, 3), dtype=np.uint8))
    config = {"model_type": "internvl", "image_token_id": 5, "vision_config": VISION}
    written(tmp_path, config, {**SQUARE, "resample": 2}, TOKENIZER)
    processor = read_video_processor(tmp_path)
    assert processor is not None
    layout = processor.layout(Clip(FACTS, (0,)), {})
    found = processor.render(frame, layout)
    np.testing.assert_array_equal(found, np.asarray(frame.resize((SIDE, SIDE), Image.Resampling.BILINEAR)))
    config = {"model_type": "smolvlm", "image_token_id": 5, "scale_factor": 2, "vision_config": VISION}
    values = {"size": {"longest_edge": 100}, "max_image_size": {"longest_edge": SIDE}, "resample": 1}
    written(tmp_path, config, values, TOKENIZER)
    processor = read_video_processor(tmp_path)
    assert processor is not None
    found = processor.render(frame, processor.layout(Clip(FACTS, (0,)), {}))
    twice = frame.resize((100, 44), Image.Resampling.LANCZOS).resize((SIDE, SIDE), Image.Resampling.LANCZOS)
    np.testing.assert_array_equal(found, np.asarray(twice))


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"), (13, "thirteen"), (20, "twenty"), (32, "thirty-two"), (64, "sixty-four"), (100, "one hundred"),
        (101, "one hundred and one"), (768, "seven hundred and sixty-eight"),
    ],
)  # fmt: skip
def test_numbers_in_words(number: int, words: str) -> None:
    """As num2words writes them."""
    assert in_words(number) == words
