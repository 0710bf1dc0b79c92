"""Shapes of encoder-decoder models of speech, and the files that serving them needs besides weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Ids of whisper-large-v3: start of a transcript, English, transcription, without times.
TRANSCRIBE = (50_258, 50_259, 50_360, 50_364)

CONFIGS: dict[str, dict[str, Any]] = {
    "whisper-large-v3": {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "activation_function": "gelu",
        "bos_token_id": 50257,
        "eos_token_id": 50257,
        "pad_token_id": 50256,
        "decoder_start_token_id": 50258,
        "d_model": 1280,
        "decoder_attention_heads": 20,
        "decoder_ffn_dim": 5120,
        "decoder_layers": 32,
        "encoder_attention_heads": 20,
        "encoder_ffn_dim": 5120,
        "encoder_layers": 32,
        "is_encoder_decoder": True,
        "max_source_positions": 1500,
        "max_target_positions": 448,
        "num_hidden_layers": 32,
        "num_mel_bins": 128,
        "scale_embedding": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 51866,
    }
}
FEATURE_EXTRACTOR = {
    "chunk_length": 30,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": 128,
    "hop_length": 160,
    "n_fft": 400,
    "n_samples": 480_000,
    "nb_max_frames": 3000,
    "padding_value": 0.0,
    "sampling_rate": 16_000,
}
# By name: what transcription needs; of the languages only English.
TOKENS = {
    "<|endoftext|>": 50257,
    "<|startoftranscript|>": 50258,
    "<|en|>": 50259,
    "<|translate|>": 50359,
    "<|transcribe|>": 50360,
    "<|startofprev|>": 50362,
    "<|nospeech|>": 50363,
    "<|notimestamps|>": 50364,
    "<|0.00|>": 50365,
}
GENERATION = {"eos_token_id": 50257, "pad_token_id": 50256, "decoder_start_token_id": 50258}


def named_tokens(config: Mapping[str, Any]) -> Mapping[str, int]:
    """Returns the special tokens of a model of speech; none for other models."""
    return TOKENS if config["model_type"] == "whisper" else {}


def write_sound_files(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the feature extractor's and the generation config of a model in CONFIGS; nothing for other models."""
    if config["model_type"] != "whisper":
        return
    (folder / "preprocessor_config.json").write_text(json.dumps(FEATURE_EXTRACTOR))
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
