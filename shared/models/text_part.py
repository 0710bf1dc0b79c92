"""Checkpoints of models that also see or hear: their text part is read, as a checkpoint of that alone.

Their config.json has the text model's in `text_config`, or among its own fields; their tensors have a prefix more
(services/worker/models/loading/loader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXT_CONFIG = "text_config"


@dataclass(frozen=True, slots=True)
class TextPart:
    """Of an architecture."""

    architecture: str  # of the text model alone
    defaults: Mapping[str, Any] = field(default_factory=dict)  # that published files leave out
    rotates_by_axis: bool = False  # positions have three axes, which are one in text


GEMMA3 = {
    **{"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True},
}
TEXT_PARTS = {
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", GEMMA3),
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM"),
    "Mistral3ForConditionalGeneration": TextPart("MistralForCausalLM"),
    "Qwen2VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", rotates_by_axis=True),
    "Qwen2_5_VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", rotates_by_axis=True),
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", rotates_by_axis=True),
}
OUTER = ("dtype", "torch_dtype", "eos_token_id", "quantization_config", "tie_word_embeddings")


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
    found = {**part.defaults, **{key: value for key, value in inner.items() if value is not None}}
    found |= {key: config[key] for key in OUTER if config.get(key) is not None}
    if part.rotates_by_axis:
        found |= {key: _plain(found[key]) for key in ("rope_scaling", "rope_parameters") if key in found}
    return found | {"architectures": [part.architecture]}


def _plain(rope: Any) -> Any:
    """Text has the same position on all axes, which are then rotated as one."""
    if not isinstance(rope, dict):
        return rope
    left = {key: value for key, value in rope.items() if not key.startswith("mrope")}
    return {key: "default" if value == "mrope" else value for key, value in left.items()}
