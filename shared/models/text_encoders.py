"""Encoder-decoder models of text: what frontends and workers read of them in config.json. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.shared.errors import InvalidArgument

T5, BART = ("t5", "mt5", "umt5"), ("bart", "mbart")
FAMILIES = (*T5, *BART)  # model_type
T5_TOKENS = 512  # of an encoder prompt, where config.json has no n_positions: the length of the training texts
BART_TOKENS = 1024
T5_START, BART_START = 0, 2  # decoder_start_token_id of the classes of transformers


@dataclass(frozen=True, slots=True)
class TextEncoderInfo:
    """Encoder of prompts, and the prompt with which the decoder starts by itself."""

    max_tokens: int
    decoder_start: tuple[int, ...]


def text_encoder_of(folder: Path) -> TextEncoderInfo | None:
    """Returns the encoder of the model in a folder; None for models that are no encoder-decoder of text. Raises
    InvalidArgument."""
    path = folder / "config.json"
    values = json.loads(path.read_text()) if path.is_file() else {}
    if values.get("model_type") not in FAMILIES or not values.get("is_encoder_decoder", True):
        return None
    generation = folder / "generation_config.json"
    asked = json.loads(generation.read_text()) if generation.is_file() else {}
    return read_text_encoder({**values, **{name: value for name, value in asked.items() if value is not None}})


def read_text_encoder(values: Mapping[str, Any]) -> TextEncoderInfo:
    """Reads config.json, with the token ids of generation_config.json if these are to count. Raises InvalidArgument for
    values that are no integers."""
    is_t5 = values.get("model_type") in T5
    name, default = ("n_positions", T5_TOKENS) if is_t5 else ("max_position_embeddings", BART_TOKENS)
    start = _integer(values, "decoder_start_token_id", T5_START if is_t5 else BART_START)
    # Generation of transformers appends it whatever the logits are.
    forced = _integer(values, "forced_bos_token_id", -1)
    return TextEncoderInfo(_integer(values, name, default), (start,) if forced < 0 else (start, forced))


def _integer(values: Mapping[str, Any], name: str, default: int) -> int:
    """Returns the integer in the field `name`, `default` for an absent one or null. Raises InvalidArgument."""
    found = values.get(name)
    if found is None:
        return default
    if not isinstance(found, int) or isinstance(found, bool):
        raise InvalidArgument(f"config.json: {name} is {found!r}; it must be an integer", field="model")
    return found
