"""Random checkpoints of models that take sound, prompts with clips, and the answers of transformers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers

from quire.services.worker.step.fetched_item import FetchedItem
from quire.shared.media.registry import read_audio_processor
from quire.shared.pb.common.v1 import media_pb2
from tests.services.worker.checkpoints import SHAPE, VOCAB_SIZE
from tests.shared.media.audio.files import noise

NUM_TOKENS = 6
RATE = 16_000
AUDIO = VOCAB_SIZE - 2  # placeholder
SECONDS = 1  # of a piece of these small encoders, in place of 30
TOWER = {
    "num_mel_bins": 20,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "d_model": 32,
    "max_source_positions": 50 * SECONDS,
}
VOXTRAL_TOWER = {
    "num_mel_bins": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 160,
    "hidden_size": 32,
    "max_source_positions": 50 * SECONDS,
}


def qwen2_audio(**changes: Any) -> Any:
    text = {"model_type": "qwen2", **SHAPE, "hidden_size": 96, **changes}
    config = transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", **TOWER}, text_config=text, audio_token_index=AUDIO
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def voxtral(**changes: Any) -> Any:
    text = {"model_type": "llama", **SHAPE, **changes}
    config = transformers.VoxtralConfig(
        audio_config={"model_type": "voxtral_encoder", **VOXTRAL_TOWER}, text_config=text, audio_token_id=AUDIO
    )
    return transformers.VoxtralForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "qwen2_audio": qwen2_audio,
    "voxtral": voxtral,
}
# Lengths of clips in samples: the shortest, odd ones, one that fills a piece.
LENGTHS = {
    "qwen2_audio": (961, 1_121, 5_001, 15_840, 15_999, 16_000),  # one token alone is another path in transformers
    "voxtral": (1, 7_000, 16_000, 16_001, 40_000),
}


class SoundCheckpoint(NamedTuple):
    """Saved checkpoint with the model that made it."""

    folder: Path
    model: Any
    extractor: transformers.WhisperFeatureExtractor


def save(name: str, folder: Path) -> SoundCheckpoint:
    """Saves the checkpoint with random weights and its feature extractor's file."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=TOWER["num_mel_bins"], chunk_length=SECONDS)
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"feature_size": TOWER["num_mel_bins"], "chunk_length": SECONDS})
    )
    return SoundCheckpoint(folder, model, extractor)


class SoundPrompt(NamedTuple):
    """Prompt with clips, as workers get it and as transformers gets it."""

    tokens: list[int]
    media: tuple[media_pb2.MediaItem, ...]
    items: list[FetchedItem]
    clips: list[np.ndarray]


class Clip(NamedTuple):
    """Part of a prompt: so many samples of noise."""

    num_samples: int


def prompt(checkpoint: SoundCheckpoint, *parts: int | Clip) -> SoundPrompt:
    """Returns a prompt: a number stands for as many tokens of text."""
    processor = read_audio_processor(checkpoint.folder)
    assert processor is not None
    asked = SoundPrompt([], (), [], [])
    media = []
    for part in parts:
        if isinstance(part, int):
            tokens = range(len(asked.tokens), len(asked.tokens) + part)
            asked.tokens.extend((7 * token + 3) % (VOCAB_SIZE - 14) + 10 for token in tokens)
            continue
        samples = noise(part.num_samples, seed=part.num_samples)
        layout = processor.sound_layout(len(samples), {})
        expansion = processor.expand(layout, None)  # type: ignore[arg-type]
        features = processor.features(samples, layout)
        assert features.shape == layout.shape
        identifier = hashlib.sha256(samples.tobytes()).digest()
        count = len(expansion.token_ids)
        place = {"offset": len(asked.tokens), "length": count, "num_embeddings": count}
        media.append(media_pb2.MediaItem(identifier=identifier, modality="audio", **place))
        asked.items.append(FetchedItem(identifier, count, layout.numbers, np.ascontiguousarray(features)))
        asked.clips.append(samples)
        asked.tokens.extend(expansion.token_ids)
    return asked._replace(media=tuple(media))


def inputs(checkpoint: SoundCheckpoint, tokens: Sequence[int], clips: Sequence[np.ndarray]) -> dict[str, Any]:
    """Returns the inputs of transformers' model, with the features of its own extractor."""
    ids = torch.tensor([tokens])
    found: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if not clips:
        return found
    if checkpoint.model.config.model_type == "voxtral":
        piece = SECONDS * RATE
        pieces = [
            checkpoint.extractor(
                clip, sampling_rate=RATE, padding=True, truncation=False, pad_to_multiple_of=piece, return_tensors="pt"
            )
            .input_features.reshape(TOWER["num_mel_bins"], -1, 2 * TOWER["max_source_positions"])
            .transpose(0, 1)
            for clip in clips
        ]
        return {**found, "input_features": torch.cat(pieces)}
    made = checkpoint.extractor(
        [*clips], sampling_rate=RATE, return_attention_mask=True, padding="max_length", return_tensors="pt"
    )
    return {**found, "input_features": made.input_features, "feature_attention_mask": made.attention_mask}


def greedy(checkpoint: SoundCheckpoint, asked: SoundPrompt) -> list[int]:
    model = checkpoint.model
    model.generation_config.eos_token_id = None  # the rig samples on after it
    with torch.inference_mode():
        given = inputs(checkpoint, asked.tokens, asked.clips)
        found = model.generate(**given, max_new_tokens=NUM_TOKENS, do_sample=False)
    return found[0, len(asked.tokens) :].tolist()
