"""Frames that families take from videos are those of transformers' video processors, which require torchvision: their
choices are recorded here, by (number of frames, frames per second, options)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.shared.errors import InvalidArgument
from quire.shared.media.registry import read_video_processor
from quire.shared.media.video import Clip, VideoFacts, VideoProcessor

SIDE = 28
TOWER = {"image_size": SIDE, "patch_size": 7}
SQUARE = {"size": {"height": SIDE, "width": SIDE}}
ANYRES = {**SQUARE, "image_grid_pinpoints": [[SIDE, 2 * SIDE]]}
SMOLVLM = {
    "size": {"longest_edge": 2 * SIDE}, "max_image_size": {"longest_edge": SIDE},
    "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 512}},
}  # fmt: skip
# Name -> config.json, preprocessor_config.json.
MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2.5": ({"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14}}, {}),
    "qwen3": ({"model_type": "qwen3_vl", "vision_config": {"patch_size": 16}}, {"patch_size": 16}),
    "internvl": ({"model_type": "internvl", "vision_config": TOWER}, SQUARE),
    "smolvlm": ({"model_type": "smolvlm", "vision_config": TOWER}, SMOLVLM),
    "llava_onevision": ({"model_type": "llava_onevision", "vision_config": TOWER}, ANYRES),
}
CHOSEN: dict[str, list[tuple[int, float, dict[str, Any], list[int]]]] = {
    "qwen2.5": [
        (7, 8, {}, [0, 1, 3, 5]),
        (32, 8, {}, [0, 4, 8, 12, 16, 20, 24, 28]),
        (61, 29.97, {}, [0, 15, 30, 45]),
        (100, 30, {}, [0, 16, 33, 50, 66, 83]),
        (9, 1, {}, [0, 1, 2, 3, 4, 5, 6, 7]),
        (32, 8, {"num_frames": 6}, [0, 5, 10, 16, 21, 26]),
        (50, 25, {"num_frames": 7}, [0, 6, 12, 18, 25, 31, 37, 43]),
        (33, 10, {"num_frames": 8}, [0, 4, 8, 12, 16, 20, 24, 28]),
    ],
    "qwen3": [
        (7, 8, {}, [0, 2, 4, 6]),
        (32, 8, {}, [0, 4, 9, 13, 18, 22, 27, 31]),
        (61, 29.97, {}, [0, 20, 40, 60]),
        (100, 30, {}, [0, 20, 40, 59, 79, 99]),
        (9, 1, {}, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (32, 8, {"num_frames": 6}, [0, 6, 12, 19, 25, 31]),
        (50, 25, {"num_frames": 7}, [0, 8, 16, 24, 33, 41, 49]),
        (33, 10, {"num_frames": 8}, [0, 5, 9, 14, 18, 23, 27, 32]),
    ],
    "internvl": [
        (32, 8, {"num_frames": 6}, [2, 8, 13, 18, 24, 29]),
        (50, 25, {"num_frames": 7}, [3, 10, 17, 25, 32, 39, 46]),
        (33, 10, {"num_frames": 8}, [2, 6, 10, 14, 18, 22, 26, 30]),
        (32, 8, {"fps": 2}, [2, 6, 10, 14, 18, 22, 26, 30]),
        (100, 30, {"fps": 1.5}, [10, 30, 50, 70, 90]),
    ],
    "smolvlm": [
        (32, 8, {}, [0, 10, 20, 31]),
        (61, 29.97, {}, [0, 60]),
        (300, 10, {}, [10, 50, 90, 130, 170, 210, 250, 290]),
        (900, 30, {}, [30, 150, 270, 390, 510, 630, 750, 870]),
        (5, 10, {}, [0]),
        (3000, 25, {}, [25, 446, 867, 1289, 1710, 2132, 2553, 2975]),
    ],
    "llava_onevision": [
        (32, 8, {"num_frames": 6}, [0, 5, 10, 16, 21, 26]),
        (100, 30, {"fps": 1.5}, [0, 20, 40, 60, 80]),
    ],
}


def processor_of(model: str, folder: Path) -> VideoProcessor:
    config, values = MODELS[model]
    (folder / "config.json").write_text(json.dumps({**config, "image_token_id": 70, "image_token_index": 70}))
    (folder / "preprocessor_config.json").write_text(json.dumps(values))
    added = {"80": {"content": "<video>"}}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    found = read_video_processor(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("model", MODELS)
def test_frames_are_those_of_transformers(model: str, tmp_path: Path) -> None:
    processor = processor_of(model, tmp_path)
    for count, fps, options, indices in CHOSEN[model]:
        assert list(processor.sample(VideoFacts(count, fps, 40, 40), options)) == indices, (count, fps, options)


@pytest.mark.parametrize("model", MODELS)
def test_any_number_of_frames_and_any_rate_can_be_taken(model: str, tmp_path: Path) -> None:
    """Ultra-short, hour-long, and more frames asked for than there are (vllm#48332, nvvl#74, lmms-eval#874)."""
    processor = processor_of(model, tmp_path)
    for count in (1, 2, 3, 4, 5, 59, 108_286):
        for fps in (0.01, 1.0, 23.976, 240.0):
            for options in ({}, {"fps": 3}, {"num_frames": 1}, {"num_frames": 700}, {"fps": 9, "num_frames": 5}):
                facts = VideoFacts(count, fps, 40, 60)
                indices = processor.sample(facts, options)
                assert 1 <= len(indices) <= min(count, 768)
                assert list(indices) == sorted(set(indices)), (count, fps, options)
                assert indices[-1] < count
                layout = processor.layout(Clip(facts, indices), options)
                rows = processor.expand(layout, OneToken()).num_embeddings
                assert 1 <= rows <= processor.max_embeddings


class OneToken:
    """Tokenizer in which every text is one token."""

    def encode(self, text: str) -> list[int]:
        return [7]


@pytest.mark.parametrize(
    ("model", "shape", "grid"),
    [
        ("qwen2.5", (4, 56, 56), (2, 2, 2)),
        ("qwen2.5", (5, 57, 83), (3, 2, 3)),
        ("qwen2.5", (8, 480, 640), (4, 5, 7)),
        ("qwen2.5", (2, 20, 300), (1, 1, 11)),
        ("qwen2.5", (3, 300, 20), (2, 11, 1)),
        ("qwen2.5", (9, 720, 1280), (5, 4, 8)),
        ("qwen3", (4, 56, 56), (2, 2, 2)),
        ("qwen3", (5, 57, 83), (3, 2, 3)),
        ("qwen3", (8, 480, 640), (4, 4, 5)),
        ("qwen3", (2, 20, 300), (1, 1, 15)),
        ("qwen3", (3, 300, 20), (2, 15, 1)),
        ("qwen3", (30, 100, 100), (15, 2, 2)),
        ("qwen3", (9, 720, 1280), (5, 3, 6)),
    ],
)
def test_grids_are_those_of_transformers(
    model: str, shape: tuple[int, int, int], grid: tuple[int, int, int], tmp_path: Path
) -> None:
    """Bounds hold for each frame of Qwen2.5-VL, and for all frames of Qwen3-VL together."""
    bounds = (3136, 28 * 28 * 40) if model == "qwen2.5" else (4096, 32 * 32 * 200)
    options = {"size": {"shortest_edge": bounds[0], "longest_edge": bounds[1]}}
    count, height, width = shape
    clip = Clip(VideoFacts(count, 24, height, width), tuple(range(count)))
    for capped in (False, True):
        layout = processor_of(model, tmp_path).layout(clip, {**options, "cap_pixels_per_frame": capped})
        assert layout.numbers[:3] == grid


def test_times_of_pairs_of_frames(tmp_path: Path) -> None:
    """LlamaFactory#6860, transformers#48669: times follow from the frames that were taken, and parts of a position add
    up."""
    folders = tmp_path / "2", tmp_path / "3"
    for folder in folders:
        folder.mkdir()
    second, third = processor_of("qwen2.5", folders[0]), processor_of("qwen3", folders[1])
    every_tenth = Clip(VideoFacts(100, 30.0, 56, 56), tuple(range(0, 100, 10)))  # 3 a second
    assert second.layout(every_tenth, {}).numbers[3:] == (0, 2, 5, 8, 10), "4 positions a second"
    assert third.layout(every_tenth, {}).numbers[3:] == (2, 8, 15, 22, 28), "0.17, 0.83, ... s"
    odd = Clip(VideoFacts(100, 10.0, 56, 56), (0, 50, 99))
    assert third.layout(odd, {}).numbers[3:] == (25, 99)


def test_long_videos_of_qwen_are_scaled_down_to_the_most_tokens(tmp_path: Path) -> None:
    processor = processor_of("qwen2.5", tmp_path)
    options = {"max_pixels": 12_845_056}
    clip = Clip(VideoFacts(768, 24, 1080, 1920), tuple(range(768)))
    layout = processor.layout(clip, options)
    assert 0.5 * processor.max_embeddings < processor.expand(layout, OneToken()).num_embeddings
    smallest = processor.layout(clip, {"min_pixels": 300_000, "max_pixels": 400_000})
    assert processor.expand(smallest, OneToken()).num_embeddings <= processor.max_embeddings
    strip = Clip(VideoFacts(768, 24, 20, 1990), tuple(range(768)))
    with pytest.raises(InvalidArgument, match="a video has at most 16384 tokens, and 768 frames"):
        processor.layout(strip, {"min_pixels": 300_000, "max_pixels": 400_000})


def test_frames_of_one_tile_are_bounded(tmp_path: Path) -> None:
    config, values = MODELS["internvl"]
    large = {**config, "vision_config": {"image_size": 448, "patch_size": 14}, "image_token_id": 70}
    (tmp_path / "config.json").write_text(json.dumps(large))
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**values, "size": {"height": 448, "width": 448}}))
    added = {"80": {"content": "<video>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": added}))
    processor = read_video_processor(tmp_path)
    assert processor is not None
    facts = VideoFacts(1000, 30.0, 40, 60)
    assert len(processor.sample(facts, {"num_frames": 500})) == 64
    with pytest.raises(InvalidArgument, match="at most 64 frames of 256 tokens, got 65; take fewer"):
        processor.layout(Clip(facts, tuple(range(65))), {})


def test_a_tokenizer_without_a_token_for_videos_takes_none(tmp_path: Path) -> None:
    for model in ("internvl", "smolvlm"):
        processor_of(model, tmp_path)
        (tmp_path / "tokenizer_config.json").write_text("{}")
        assert read_video_processor(tmp_path) is None


def test_files_of_videos(tmp_path: Path) -> None:
    """transformers reads processor_config.json, then video_preprocessor_config.json, then preprocessor_config.json."""
    facts = VideoFacts(100, 10.0, 56, 56)
    assert len(processor_of("qwen2.5", tmp_path).sample(facts, {})) == 20
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps({"fps": 1}))
    assert len(processor_of("qwen2.5", tmp_path).sample(facts, {})) == 10
    (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": {"num_frames": 6}}))
    assert len(processor_of("qwen2.5", tmp_path).sample(facts, {})) == 6
    for values, text in (
        ({"fps": 0}, r"processor_config.json.fps is 0; a number above 0"),
        ({"temporal_patch_size": 4}, "temporal_patch_size are"),
        ({"patch_size": 16}, "They must be equal"),
        ({"image_mean": [0, 0, 0]}, "videos are normalized with"),
    ):
        (tmp_path / "processor_config.json").write_text(json.dumps({"video_processor": values}))
        with pytest.raises(InvalidArgument, match=text):
            processor_of("qwen2.5", tmp_path)
