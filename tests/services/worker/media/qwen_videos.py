"""Prompts with videos for small random checkpoints of Qwen-VL models, as frontends make them, and what transformers
makes of them."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.columns import i32_bytes, u32_bytes
from quire.shared.media.processor import MediaProcessor, PlaceholderExpansion, TileLayout
from quire.shared.media.registry import read_media_processor, read_video_processor
from quire.shared.media.video import Clip, VideoFacts, VideoProcessor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import VOCAB_SIZE
from tests.services.worker.media.qwen_pictures import PATCH, make_qwen

VIDEO, START, END = VOCAB_SIZE - 2, VOCAB_SIZE - 3, VOCAB_SIZE - 4
IDS = {"video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}
SIDE, MERGE = PATCH["patch_size"], PATCH["spatial_merge_size"]


class Film(NamedTuple):
    """Video of noise."""

    num_frames: int
    height: int
    width: int
    fps: float = 2.0

    @property
    def frames(self) -> list[Image.Image]:
        rng = np.random.default_rng(self.num_frames * 10_000 + self.height * 100 + self.width)
        shape = self.num_frames, self.height, self.width, 3
        return [Image.fromarray(one) for one in rng.integers(0, 256, shape, dtype=np.uint8)]


class SeenItem(NamedTuple):
    """Item of a prompt with what transformers needs to know of it."""

    item: media_pb2.MediaItem
    fetched: FetchedItem
    layout: TileLayout
    fps: float  # of a video; 0: a picture


@dataclass(frozen=True)
class VideoPrompt:
    """Prompt with pictures and videos."""

    tokens: list[int]
    seen: list[SeenItem]

    @property
    def items(self) -> tuple[media_pb2.MediaItem, ...]:
        return tuple(one.item for one in self.seen)

    @property
    def fetched(self) -> list[FetchedItem]:
        return [one.fetched for one in self.seen]


class LetterTokenizer:
    """Tokenizer with a token for each letter."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) % 40 for letter in text]


def make_filming(folder: Path, name: str, tokens_per_second: int = 2) -> Any:
    """Saves a checkpoint as make_qwen() does, whose token ids of videos are in its vocabulary."""
    model = make_qwen(folder, name)
    config = json.loads((folder / "config.json").read_text())
    config |= IDS
    if name == "qwen2.5":
        config["vision_config"]["tokens_per_second"] = tokens_per_second
        model.config.vision_config.tokens_per_second = tokens_per_second
    (folder / "config.json").write_text(json.dumps(config))
    for key, value in IDS.items():
        setattr(model.config, key, value)
    return model


def video_prompt(folder: Path, *parts: int | Film | Image.Image) -> VideoPrompt:
    """Returns a prompt: a number stands for as many tokens of text."""
    pictures, videos = read_media_processor(folder), read_video_processor(folder)
    assert pictures is not None
    assert videos is not None
    prompt = VideoPrompt([], [])
    for part in parts:
        if isinstance(part, int):
            start = len(prompt.tokens)
            prompt.tokens.extend((7 * (start + i) + 3) % (VOCAB_SIZE - 5) for i in range(part))
        elif isinstance(part, Film):
            _add(prompt, *_rendered(videos, part), "video", part.fps)
        else:
            _add(prompt, *_pictured(pictures, part), "image", 0.0)
    return prompt


def _rendered(videos: VideoProcessor, film: Film) -> tuple[TileLayout, npt.NDArray[np.uint8], PlaceholderExpansion]:
    facts = VideoFacts(film.num_frames, film.fps, film.height, film.width)
    layout = videos.layout(Clip(facts, tuple(range(film.num_frames))), {})
    pixels = np.stack([videos.render(frame, layout) for frame in film.frames])
    return layout, pixels, videos.expand(layout, LetterTokenizer())


def _pictured(
    pictures: MediaProcessor, picture: Image.Image
) -> tuple[TileLayout, npt.NDArray[np.uint8], PlaceholderExpansion]:
    layout = pictures.layout(picture.height, picture.width, {})
    return layout, pictures.render(picture, layout).copy(), pictures.expand(layout, LetterTokenizer())


def _add(
    prompt: VideoPrompt,
    layout: TileLayout,
    pixels: npt.NDArray[np.uint8],
    expansion: PlaceholderExpansion,
    modality: str,
    fps: float,
) -> None:
    identifier = hashlib.sha256(pixels.tobytes() + modality.encode()).digest()
    item = media_pb2.MediaItem(
        identifier=identifier,
        offset=len(prompt.tokens),
        length=len(expansion.token_ids),
        num_embeddings=expansion.num_embeddings,
        embedding_runs=u32_bytes([number for run in expansion.runs for number in run]),
        modality=modality,
        layout=i32_bytes(list(layout.numbers)),
    )
    fetched = FetchedItem(identifier, expansion.num_embeddings, layout.numbers, pixels)
    prompt.tokens.extend(expansion.token_ids)
    prompt.seen.append(SeenItem(item, fetched, layout, fps))


def patches(pixels: npt.NDArray[np.uint8], mean: Any, std: Any) -> torch.Tensor:
    """Returns the frames of an item as transformers' processors hand them to the tower, [patches, values]."""
    normalized = (torch.from_numpy(pixels.copy()).float() / 255 - torch.tensor(mean)) / torch.tensor(std)
    frames = normalized.permute(0, 3, 1, 2)
    if len(frames) % 2:
        frames = torch.cat((frames, frames[-1:]))
    count, _, height, width = frames.shape
    rows, columns = height // SIDE, width // SIDE
    cells = frames.view(count // 2, 2, 3, rows // MERGE, MERGE, SIDE, columns // MERGE, MERGE, SIDE)
    return cells.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(count // 2 * rows * columns, -1)


def of_transformers(
    model: Any, folder: Path, prompt: VideoPrompt, tokens: list[int], video: int = VIDEO
) -> dict[str, Any]:
    """Returns the inputs of transformers' model."""
    ids = torch.tensor([tokens])
    inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    processor = read_media_processor(folder)
    assert processor is not None
    mean, std = processor.normalization.mean, processor.normalization.std
    for name, suffix, is_video in (("image", "", False), ("video", "_videos", True)):
        found = [one for one in prompt.seen if bool(one.fps) == is_video]
        if found:
            inputs[f"pixel_values{suffix}"] = torch.cat([patches(one.fetched.pixels, mean, std) for one in found])
            grids = [(one.layout.numbers[0], *(MERGE * side for side in one.layout.numbers[1:3])) for one in found]
            inputs[f"{name}_grid_thw"] = torch.tensor(grids)
    types = (ids == model.config.image_token_id).int() + 2 * (ids == video).int()
    inputs["mm_token_type_ids"] = types
    if any(one.fps for one in prompt.seen) and "2_5" in model.config.model_type:
        inputs["second_per_grid_ts"] = torch.tensor([2 / one.fps for one in prompt.seen if one.fps])
    return inputs


def positions(model: Any, prompt: VideoPrompt, num_tokens: int) -> torch.Tensor:
    """Returns the positions of Qwen2-VL and Qwen2.5-VL by the rule of their papers, [3, 1, num_tokens]: an item begins
    one after the largest position before it. transformers 5.24 begins the text after a video too early where the video
    has more time than rows and columns (huggingface/transformers#45381)."""
    parts, begin, following = [], 0, 0
    vision = model.config.vision_config
    per_second = vision.tokens_per_second if "2_5" in model.config.model_type else None
    for one in prompt.seen:
        text = one.item.offset - begin
        parts.append(torch.arange(text).expand(3, -1) + following)
        following += text
        frames, rows, columns = one.layout.numbers[:3]
        step = per_second * 2 / one.fps if per_second and one.fps else 1.0
        times = [int(index * step) for index in range(frames)]
        grid = torch.tensor(
            [(time, row, column) for time in times for row in range(rows) for column in range(columns)]
        ).T
        parts.append(grid + following)
        following = int(parts[-1].max()) + 1
        begin = one.item.offset + one.item.length
    parts.append(torch.arange(num_tokens - begin).expand(3, -1) + following)
    return torch.cat(parts, dim=1).unsqueeze(1)


def logits(
    model: Any, folder: Path, prompt: VideoPrompt, tokens: list[int], *, given: bool, video: int = VIDEO
) -> torch.Tensor:
    """Returns transformers' logits of all `tokens`. `given`: the positions are positions(), not transformers' own."""
    inputs = of_transformers(model, folder, prompt, tokens, video)
    if given:
        inputs["position_ids"] = positions(model, prompt, len(tokens))
    with torch.inference_mode():
        rows: torch.Tensor = model(**inputs, use_cache=False).logits[0]
    return rows


def greedy(model: Any, folder: Path, prompt: VideoPrompt, count: int, *, given: bool, video: int = VIDEO) -> list[int]:
    """Returns the tokens that transformers finds likeliest, one after the other."""
    tokens = list(prompt.tokens)
    for _ in range(count):
        tokens.append(int(logits(model, folder, prompt, tokens, given=given, video=video)[-1].argmax()))
    return tokens[len(prompt.tokens) :]
