"""Configuration of models run by transformers, as far as it can be checked without torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire.services.worker.layers.config_file import ConfigFile, refusal
from quire.services.worker.models.config.decoder_config import DecoderConfig, read_decoder
from quire.services.worker.models.config.rope_config import NO_ROPE

# Names of common config.json fields in older families.
NAMES = {
    "hidden_size": ("n_embd", "d_model"),
    "num_hidden_layers": ("n_layer", "num_layers"),
    "num_attention_heads": ("n_head",),
    "max_position_embeddings": ("n_positions", "max_seq_len", "n_ctx"),
}
DECODERS = ("ForCausalLM", "LMHeadModel")
FULL_ATTENTION, SLIDING_ATTENTION = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class TransformersConfig(DecoderConfig):
    """Decoder configuration that keeps config.json, from which transformers builds its own."""

    values: Mapping[str, Any] = field(default_factory=dict)


def runs(values: Mapping[str, Any]) -> bool:
    """Returns whether the installed transformers has a decoder for the architecture, without importing it."""
    kind, names = values.get("model_type"), values.get("architectures") or ()
    if not any(str(name).endswith(DECODERS) for name in names):
        return False
    found = importlib.util.find_spec("transformers")
    if not isinstance(kind, str) or not kind.replace("_", "").isalnum() or found is None or found.origin is None:
        return False
    return (Path(found.origin).parent / "models" / kind / f"modeling_{kind}.py").is_file()


def read(config: ConfigFile) -> TransformersConfig:
    """Reads the configuration under common or older field names.

    Raises InvalidArgument for models that are known not to run: code in the checkpoint, quantization, ALiBi.
    """
    if config.has("auto_map"):
        raise refusal("auto_map", config.get("auto_map"), "code from a checkpoint is never executed")
    if config.get("quantization_config"):
        raise refusal(
            "quantization_config",
            config.get("quantization_config"),
            "quantization is not supported with the code of transformers",
        )
    if config.flag("alibi"):
        raise refusal("alibi", True, "ALiBi is not supported")
    values = dict(config.values)
    for name, others in NAMES.items():
        values.setdefault(name, next((values[other] for other in others if other in values), None))
    values |= {"intermediate_size": 0, "hidden_act": "silu", "hidden_activation": None}  # only used by transformers
    values.setdefault("num_key_value_heads", 1 if config.flag("multi_query") else None)
    decoder = read_decoder(ConfigFile({k: v for k, v in values.items() if v is not None}), rope=NO_ROPE)
    known = {item.name: getattr(decoder, item.name) for item in fields(decoder)}
    known["sliding_windows"] = _windows(config, decoder.num_layers)
    return TransformersConfig(**known, values=config.values)


def _windows(config: ConfigFile, num_layers: int) -> tuple[int, ...]:
    """Returns each layer's window in tokens, 0 for none: by layer_types, else the same for all. Raises InvalidArgument
    for other types."""
    length = config.integer("sliding_window", 0) if config.get("sliding_window") else 0
    kinds = config.get("layer_types")
    if kinds is None:
        return (length if config.flag("use_sliding_window", True) else 0,) * num_layers
    for kind in kinds:
        if kind not in (FULL_ATTENTION, SLIDING_ATTENTION):
            raise refusal("layer_types", kind, f"supported: {FULL_ATTENTION}, {SLIDING_ATTENTION}")
    return tuple(length if kind == SLIDING_ATTENTION else 0 for kind in kinds)
