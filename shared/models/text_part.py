"""Checkpoints of models that also see or hear: their text part is read, as a checkpoint of that alone.

Their config.json has the text model's in `text_config`, or among its own fields; their tensors have a prefix more
(services/worker/models/loading/loader.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_CONFIG, TIE = "text_config", "tie_word_embeddings"


class Ties(enum.Enum):
    """Which tie_word_embeddings counts, as in the class of transformers that has the output head."""

    OUTER = "outer"  # false where it is left out, unless `defaults` says otherwise
    EITHER = "either"
    INNER = "inner"


@dataclass(frozen=True, slots=True)
class TextPart:
    """Of an architecture."""

    architecture: str  # of the text model alone
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that files may leave out, as transformers has them
    rotates_by_axis: bool = False  # positions have three axes, which are one in text
    ties: Ties = Ties.OUTER


GEMMA3 = {
    **{"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh", TIE: True},
    **{"rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096},
}
LLAMA4 = {
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    **{"rope_theta": 5e5, "attention_chunk_size": 8192, "use_qk_norm": True, "attn_temperature_tuning": True},
    **{"floor_scale": 8192, "attn_scale": 0.1},
}
MISTRAL3 = {
    **{"num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
    **{TIE: True, "sliding_window": 4096},
}
QWEN2 = {
    **{"num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    **{"use_sliding_window": False},
}
QWEN3 = {
    **{"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6},
    **{"rope_theta": 5e5, "attention_bias": False},
}
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", GEMMA3),
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", LLAMA4, ties=Ties.INNER),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM", MISTRAL3),
    "Qwen2VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", QWEN2, rotates_by_axis=True, ties=Ties.EITHER),
    "Qwen2_5_VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", QWEN2, rotates_by_axis=True, ties=Ties.EITHER),
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", QWEN3, rotates_by_axis=True),
}

# What transformers reads of the whole model's config.json; everything else of its text model's, also where both say it.
OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """`config`: config.json; as it is, if it is that of a text model."""
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    part = TEXT_PARTS.get(name)
    if part is None:
        return config
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):  # as files were before transformers 5
        inner = {key: value for key, value in config.items() if not key.endswith("_config")}
    found = {**part.defaults, **inner}  # null is a value: no window, no chunks
    found |= {key: config[key] for key in OUTER if config.get(key) is not None}
    found[TIE] = _ties(part, inner.get(TIE), config.get(TIE))
    if part.rotates_by_axis:
        found |= {key: _plain(found[key]) for key in ("rope_scaling", "rope_parameters") if key in found}
    return found | {"architectures": [part.architecture]}


def _ties(part: TextPart, inner: Any, outer: Any) -> Any:
    """Whether the output head is the embedding, unless the checkpoint has another one."""
    if part.ties is Ties.INNER:
        return inner or False
    if part.ties is Ties.EITHER:
        return outer or inner or False
    return part.defaults.get(TIE, False) if outer is None else outer


def _plain(rope: Any) -> Any:
    """Text has the same position on all axes, which are then rotated as one."""
    if not isinstance(rope, dict):
        return rope
    left = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in left.items()}
