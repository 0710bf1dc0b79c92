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


def granite_speech(**changes: Any) -> Any:
    encoder = {"input_dim": 40, "num_layers": 4, "hidden_dim": 24, "num_heads": 3, "dim_head": 6, "output_dim": 9}
    encoder |= {"context_size": 20, "max_pos_emb": 30, "conv_kernel_size": 7, "feedforward_mult": 2}
    projector = {"model_type": "blip_2_qformer", "hidden_size": 32, "encoder_hidden_size": 24, "num_hidden_layers": 3}
    projector |= {"num_attention_heads": 4, "intermediate_size": 40, "cross_attention_frequency": 2}
    text = {"model_type": "granite", **SHAPE, "embedding_multiplier": 3.0, **changes}
    config = transformers.GraniteSpeechConfig(
        encoder_config=encoder,
        projector_config=projector,
        text_config=text,
        audio_token_index=AUDIO,
        has_lora_adapter=False,
        tie_word_embeddings=False,
    )
    return transformers.GraniteSpeechForConditionalGeneration(config)


class GraniteExtractor:
    """The features of GraniteSpeechFeatureExtractor, which needs torchaudio, by the filters of transformers."""

    n_fft, win_length, hop_length, n_mels = 512, 400, 160, TOWER["num_mel_bins"]

    def __call__(self, clip: np.ndarray) -> torch.Tensor:
        window = torch.hann_window(self.win_length)
        spectrum = torch.stft(
            torch.from_numpy(clip),
            self.n_fft,
            self.hop_length,
            self.win_length,
            window=window,
            pad_mode="reflect",
            return_complex=True,
        )
        filters = transformers.audio_utils.mel_filter_bank(
            self.n_fft // 2 + 1, self.n_mels, 0.0, RATE / 2, RATE, norm=None, mel_scale="htk"
        )
        mel = (spectrum.abs() ** 2).T @ torch.from_numpy(filters).float()
        logs = mel.clip(min=1e-10).log10()
        logs = torch.maximum(logs, logs.amax() - 8.0) / 4 + 1
        return logs[: len(logs) // 2 * 2].reshape(1, -1, 2 * self.n_mels)


def granite_embeddings(model: Any, ids: torch.Tensor, clips: Sequence[np.ndarray]) -> torch.Tensor:
    """Returns embeddings with the rows of each clip by itself: transformers fills clips of a batch with silence, which
    the encoder takes for sound."""
    inner, extract = model.model, GraniteExtractor()
    with torch.inference_mode():
        embeddings = inner.get_input_embeddings()(torch.where(ids == AUDIO, 0, ids))
        rows = [inner.get_audio_features(extract(clip)).pooler_output[0] for clip in clips]
        embeddings[ids == AUDIO] = torch.cat(rows)
    return embeddings


def qwen3_asr(**changes: Any) -> Any:
    audio = {**TOWER, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6, "output_dim": 64}
    audio["max_position_embeddings"] = 13
    del audio["max_source_positions"]
    text = {"model_type": "qwen3", **SHAPE, "tie_word_embeddings": True, **changes}
    audio["output_dim"] = text["hidden_size"]
    config = transformers.Qwen3ASRConfig(
        audio_config={"model_type": "qwen3_asr_encoder", **audio}, text_config=text, audio_token_id=AUDIO
    )
    return transformers.Qwen3ASRForConditionalGeneration(config)


MODELS: dict[str, Callable[[], Any]] = {
    "granite_speech": granite_speech,
    "qwen2_audio": qwen2_audio,
    "qwen3_asr": qwen3_asr,
    "voxtral": voxtral,
}
# Lengths of clips in samples: the shortest, odd ones, one that fills a piece.
LENGTHS = {
    "granite_speech": (257, 7_000, 7_199, 15_999, 16_000, 40_001),
    "qwen2_audio": (961, 1_121, 5_001, 15_840, 15_999, 16_000),  # one token alone is another path in transformers
    "qwen3_asr": (1, 7_000, 8_001, 16_000, 16_159, 70_000),
    "voxtral": (1, 7_000, 16_000, 16_001, 40_000),
}


class SoundCheckpoint(NamedTuple):
    """Saved checkpoint with the model that made it."""

    folder: Path
    model: Any
    extractor: Any


def save(name: str, folder: Path) -> SoundCheckpoint:
    """Saves the checkpoint with random weights and its feature extractor's file."""
    torch.manual_seed(3)
    model = MODELS[name]().eval()
    for buffer_name, buffer in model.named_buffers():
        if "running_" in buffer_name:
            buffer.copy_(0.5 + torch.rand(buffer.shape))
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape)
    model.save_pretrained(folder)
    sizes = {"feature_size": TOWER["num_mel_bins"], "chunk_length": SECONDS}
    if name == "granite_speech":
        sizes, extractor = {"n_mels": TOWER["num_mel_bins"]}, GraniteExtractor()
    elif name == "qwen3_asr":
        sizes["n_window"] = 50
        extractor = transformers.Qwen3ASRFeatureExtractor(**sizes)
    else:
        extractor = transformers.WhisperFeatureExtractor(**sizes)
    (folder / "preprocessor_config.json").write_text(json.dumps(sizes))
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
    if checkpoint.model.config.model_type == "granite_speech":
        embeddings = granite_embeddings(checkpoint.model, ids, clips)
        return {"inputs_embeds": embeddings, "attention_mask": found["attention_mask"]}
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
    if checkpoint.model.config.model_type == "qwen3_asr":
        made = checkpoint.extractor(
            [*clips], sampling_rate=RATE, padding=True, return_tensors="pt", return_attention_mask=True
        )
        return {**found, "input_features": made.input_features, "input_features_mask": made.attention_mask}
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
    start = 0 if "inputs_embeds" in given else len(asked.tokens)
    return found[0, start:].tolist()
