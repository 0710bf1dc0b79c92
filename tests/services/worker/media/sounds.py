"""Small random Whisper checkpoints, random spectrograms, and prompts with them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import transformers

from quire.shared.pb.common.v1 import media_pb2

Features = npt.NDArray[np.float32]

VOCAB_SIZE, NUM_BINS, NUM_ROWS = 61, 5, 22
SIZES = {
    **{"d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4},
    **{"decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 64, "max_target_positions": 64},
    **{"num_mel_bins": NUM_BINS, "max_source_positions": NUM_ROWS, "vocab_size": VOCAB_SIZE},
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 3},
    **{"begin_suppress_tokens": None, "suppress_tokens": None},
}


def make_whisper(folder: Path, seed: int = 7, **changes: Any) -> Any:
    """Saves a checkpoint with random weights; returns the model of transformers."""
    model = transformers.WhisperForConditionalGeneration(transformers.WhisperConfig(**{**SIZES, **changes})).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return model


def spectrogram(seed: int, num_bins: int = NUM_BINS, num_rows: int = NUM_ROWS) -> Features:
    """Returns random features, float32 [1, num_bins, 2 * num_rows]."""
    return np.random.default_rng(seed).normal(size=(1, num_bins, 2 * num_rows)).astype(np.float32)


def identifier_of(features: Features) -> bytes:
    return hashlib.sha256(features.tobytes()).digest()


def item_of(features: Features) -> media_pb2.MediaItem:
    return media_pb2.MediaItem(
        identifier=identifier_of(features),
        length=1,
        num_embeddings=features.shape[-1] // 2,
        modality="audio",
        is_attended=True,
    )


@torch.inference_mode()
def logits_of(model: Any, features: Features, tokens: list[int]) -> torch.Tensor:
    """Returns the logits of transformers, [len(tokens), vocab_size]."""
    out: torch.Tensor = model(torch.from_numpy(features), decoder_input_ids=torch.tensor([tokens])).logits[0]
    return out


@torch.inference_mode()
def greedy(
    model: Any,
    features: Features,
    prompt: list[int],
    num_tokens: int,
    banned: Sequence[int] = (),
    banned_first: Sequence[int] = (),
) -> list[int]:
    """Returns the tokens that transformers finds most likely after `prompt`, without those that are banned."""
    tokens = list(prompt)
    for number in range(num_tokens):
        logits = logits_of(model, features, tokens)[-1]
        logits[[*banned, *(() if number else banned_first)]] = float("-inf")
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]
