"""Small random checkpoints of encoder-decoder models of text, and encoder prompts as items."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import transformers

from quire.shared.pb.common.v1 import media_pb2

VOCAB_SIZE = 61
T5_SIZES = {
    **{"vocab_size": VOCAB_SIZE, "d_model": 32, "d_kv": 12, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3},
    **{"num_heads": 4, "relative_attention_num_buckets": 8, "relative_attention_max_distance": 20},
    **{"n_positions": 64, "decoder_start_token_id": 0},
}
BART_SIZES = {
    **{"vocab_size": VOCAB_SIZE, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 48},
    **{"decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 4},
    **{"max_position_embeddings": 64, "decoder_start_token_id": 2, "forced_eos_token_id": None},
}


def t5(**changes: Any) -> Any:
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**{**T5_SIZES, **changes}))


def t5_gated(**changes: Any) -> Any:
    """Flan-T5's form: gates, and an output head of its own that gets unscaled hidden states."""
    changes = {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False, **changes}
    config = transformers.T5Config(**{**T5_SIZES, **changes})
    config.tie_word_embeddings = False
    model = transformers.T5ForConditionalGeneration(config)
    for part in (model.encoder, model.decoder):
        part.set_input_embeddings(model.shared)
    return model


def mt5(**changes: Any) -> Any:
    return transformers.MT5ForConditionalGeneration(transformers.MT5Config(**{**T5_SIZES, **changes}))


def umt5(**changes: Any) -> Any:
    return transformers.UMT5ForConditionalGeneration(transformers.UMT5Config(**{**T5_SIZES, **changes}))


def bart(**changes: Any) -> Any:
    return transformers.BartForConditionalGeneration(transformers.BartConfig(**{**BART_SIZES, **changes}))


def mbart(**changes: Any) -> Any:
    changes = {"scale_embedding": True, **changes}
    return transformers.MBartForConditionalGeneration(transformers.MBartConfig(**{**BART_SIZES, **changes}))


MODELS: dict[str, Callable[..., Any]] = {
    "t5": t5,
    "t5_gated": t5_gated,
    "mt5": mt5,
    "umt5": umt5,
    "bart": bart,
    "mbart": mbart,
}


class SavedText(NamedTuple):
    """Saved checkpoint with the model that made it."""

    folder: Path
    model: Any


def save(name: str, folder: Path, seed: int = 7, **changes: Any) -> SavedText:
    """Saves a checkpoint with random weights, for which greedy answers vary with the prompt."""
    model = MODELS[name](**changes).eval()
    model.set_attn_implementation("eager")
    generator = torch.Generator().manual_seed(seed)
    for named, parameter in model.named_parameters():
        scale, offset = (0.3, 1.0) if parameter.dim() == 1 else (1.2 * parameter[0].numel() ** -0.5, 0.0)
        if "relative_attention_bias" in named:
            scale, offset = 1.0, 0.0
        elif "bart" in name and named.endswith("bias"):
            offset = 0.0  # else the norms after each part leave little of the prompt
        elif "bart" in name and "encoder_attn" in named:
            scale *= 2
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    if "final_logits_bias" in dict(model.named_buffers()):
        model.final_logits_bias.copy_(0.3 * torch.randn(model.final_logits_bias.shape, generator=generator))
    model.tie_weights()
    model.save_pretrained(folder)
    return SavedText(folder, model)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed + 100 * length).integers(3, VOCAB_SIZE, length)]


def features(prompt: list[int]) -> npt.NDArray[np.float32]:
    """Returns an encoder prompt as workers fetch it."""
    return np.array(prompt, np.float32).reshape(1, 1, -1)


def identifier_of(prompt: list[int]) -> bytes:
    return hashlib.sha256(repr(prompt).encode()).digest()


def item_of(prompt: list[int]) -> media_pb2.MediaItem:
    return media_pb2.MediaItem(
        identifier=identifier_of(prompt), length=1, num_embeddings=len(prompt), modality="text", is_attended=True
    )


@torch.inference_mode()
def logits_of(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Returns the logits of transformers for `tokens` of the decoder, [len(tokens), vocab_size]."""
    out: torch.Tensor = model(torch.tensor([prompt]), decoder_input_ids=torch.tensor([tokens])).logits[0]
    return out


def greedy(model: Any, prompt: list[int], start: list[int], num_tokens: int) -> list[int]:
    """Returns the tokens that transformers finds most likely after `start`."""
    tokens = list(start)
    for _ in range(num_tokens):
        tokens.append(int(logits_of(model, prompt, tokens)[-1].argmax()))
    return tokens[len(start) :]
