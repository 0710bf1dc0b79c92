"""Answers about videos whose frames are single tiles are those of transformers, from the frames to the last token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.columns import u32_bytes
from quire.shared.media.processor import MediaProcessor, TileLayout
from quire.shared.media.registry import read_media_processor, read_video_processor
from quire.shared.media.video import Clip, VideoFacts, VideoProcessor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import VOCAB_SIZE
from tests.services.worker.media.families import NUM_TOKENS
from tests.services.worker.media.pictures import identifier_of
from tests.services.worker.media.tiled_families import SpecialTokens, answer_of_transformers, asked, saved
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

VIDEO = VOCAB_SIZE - 2
FRAMES = [(4, 30, 60), (1, 28, 28), (7, 50, 20)]  # number, height, width


def processors(folder: Path, family: str, model: Any) -> tuple[MediaProcessor, VideoProcessor]:
    """Returns the processors of a checkpoint, to whose tokenizer a token for videos is added."""
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings["added_tokens_decoder"][str(VIDEO)] = {"content": "<video>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if family == "llava_onevision":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"video_token_index": VIDEO}))
        model.config.video_token_index = VIDEO
    pictures, videos = read_media_processor(folder), read_video_processor(folder)
    assert pictures is not None
    assert videos is not None
    return pictures, videos


def rendered(videos: VideoProcessor, shape: tuple[int, int, int]) -> tuple[TileLayout, np.ndarray]:
    count, height, width = shape
    frames = np.random.default_rng(count).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    layout = videos.layout(Clip(VideoFacts(count, 2.0, height, width), tuple(range(count))), {})
    return layout, np.stack([videos.render(Image.fromarray(frame), layout) for frame in frames])


def inputs_of(family: str, videos: VideoProcessor, tiles: list[np.ndarray]) -> dict[str, Any]:
    """Returns what transformers' processor hands to the model beside the tokens."""
    mean, std, factor = videos.normalization
    normalized = [
        ((torch.from_numpy(one.copy()).float() * factor - torch.tensor(mean)) / torch.tensor(std)).permute(0, 3, 1, 2)
        for one in tiles
    ]
    if family == "llava_onevision":
        return {"pixel_values_videos": normalized[0][None]}
    pixels = torch.cat(normalized)
    return {"pixel_values": pixels[None] if family == "smolvlm" else pixels}


@pytest.mark.parametrize("chunk", [1000, 7])
@pytest.mark.parametrize("family", ["internvl", "smolvlm", "llava_onevision"])
def test_answers_about_videos_are_those_of_transformers(family: str, chunk: int, tmp_path: Path) -> None:
    """transformers takes several videos of a LLaVA-OneVision only if they have equally many frames: one is asked
    about."""
    model = saved(family, tmp_path)
    pictures, videos = processors(tmp_path, family, model)
    question = asked(pictures, [] if family == "llava_onevision" else [(40, 90)])
    tokens, media, items = list(question.tokens), list(question.media), list(question.items)
    tiles = [item.pixels for item in items]
    for shape in FRAMES[:1] if family == "llava_onevision" else FRAMES:
        layout, frames = rendered(videos, shape)
        expansion = videos.expand(layout, SpecialTokens())
        count = expansion.num_embeddings
        assert count <= videos.max_embeddings
        tiles.append(frames)
        items.append(FetchedItem(identifier_of(frames), count, layout.numbers, frames))
        media.append(
            media_pb2.MediaItem(
                identifier=identifier_of(frames), offset=len(tokens), length=len(expansion.token_ids),
                num_embeddings=count, embedding_runs=u32_bytes([n for run in expansion.runs for n in run]),
                modality="video", layout=u32_bytes(layout.numbers),
            )
        )  # fmt: skip
        tokens += [*expansion.token_ids, 9, 26]
    rig = Rig(tmp_path, num_blocks=512)
    with torch.inference_mode():
        batch = rig.replica.media.encode(items)
    batch.wait()
    assert batch.errors == (None,) * len(items)
    count = min(chunk, len(tokens))
    rig.step([New(0, tokens, media=tuple(media))], {0: count})
    while (left := len(tokens) - rig.scheduler.rows[0].num_computed) > 0:
        rig.step(counts={0: min(chunk, left)})
    while len(rig.tokens(0)) < len(tokens) + NUM_TOKENS:
        rig.step()
    expected = answer_of_transformers(model, tokens, inputs_of(family, videos, tiles))
    assert rig.tokens(0)[len(tokens) :][:NUM_TOKENS] == expected
