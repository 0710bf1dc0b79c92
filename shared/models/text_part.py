"""Text part of multimodal checkpoints, read as a checkpoint of its own.

Its configuration is in config.json's `text_config` or among the top-level fields; its tensors have an additional
prefix (services/worker/models/loading/loader.py).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from quire.shared.models.page_retrieval import unwrapped

TEXT_CONFIG, TIE = "text_config", "tie_word_embeddings"


class Ties(enum.Enum):
    """Selects the tie_word_embeddings that applies, as in the transformers class that has the output head."""

    OUTER = "outer"  # the top-level value; if missing: that of `defaults`, else false
    EITHER = "either"
    INNER = "inner"


@dataclass(frozen=True, slots=True)
class RopeAxes:
    """Division of a head's pairs among time, row and column, in the notation of config.json."""

    section: tuple[int, int, int]  # unless config.json gives another
    interleaved: bool  # of the class, whatever config.json says


@dataclass(frozen=True, slots=True)
class TextPart:
    """Text part of one multimodal architecture."""

    architecture: str  # class of the text model; empty: that of text_config, by its model_type
    defaults: Mapping[str, Any] = field(default_factory=dict)  # transformers' defaults for missing fields
    axes: RopeAxes | None = None  # positions have three axes, equal for text
    ties: Ties = Ties.OUTER
    outer: tuple[str, ...] = ()  # further fields that are read from the top level alone; defaults where it lacks them
    # model_type of text_config -> class of the text model, and defaults, where they are others
    others: Mapping[str, tuple[str, Mapping[str, Any]]] = field(default_factory=dict)


CLIP = {
    **{"vocab_size": 49_408, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12},
    **{"num_attention_heads": 8, "max_position_embeddings": 77, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    **{"projection_dim": 512},
}
SIGLIP = {
    **{"vocab_size": 32_000, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12},
    **{"num_attention_heads": 12, "max_position_embeddings": 64, "hidden_act": "gelu_pytorch_tanh"},
    **{"layer_norm_eps": 1e-6},
}
GEMMA = {
    **{"vocab_size": 257_152, "hidden_size": 2048, "intermediate_size": 16_384, "num_hidden_layers": 18},
    **{"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, "max_position_embeddings": 8192},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "gelu_pytorch_tanh"},
}
GEMMA3 = {
    **{"vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256},
    **{"max_position_embeddings": 131_072, "hidden_activation": "gelu_pytorch_tanh", TIE: True},
    **{"rms_norm_eps": 1e-6, "query_pre_attn_scalar": 256, "sliding_window": 4096},
}
GRANITE = {  # of transformers' GraniteConfig
    **{"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
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
MINISTRAL3 = {
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 262_144, "rms_norm_eps": 1e-5},
    **{"sliding_window": None},
}
PHI4 = {
    **{"vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5},
    **{"original_max_position_embeddings": 4096, "rope_theta": 1e4, "bos_token_id": 199_999},
    **{"eos_token_id": [199_999, 200_020], "sliding_window": None},
}
QWEN2 = {
    **{"num_key_value_heads": 8, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
    **{"use_sliding_window": False},
}
GOT_OCR2 = {
    **{"vocab_size": 151_860, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24},
    **{"num_attention_heads": 16, "num_key_value_heads": 16, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e6, "use_sliding_window": False, TIE: True},
}
QWEN2_WHOLE = {  # of transformers' Qwen2Config, which Qwen2-Audio's files rely on
    **{"vocab_size": 151_936, "hidden_size": 4096, "intermediate_size": 22_016, "num_hidden_layers": 32},
    **{"num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32_768},
    **{"rms_norm_eps": 1e-6, "rope_theta": 1e4, "use_sliding_window": False},
}
VOXTRAL = {
    **{"vocab_size": 131_072, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 30},
    **{"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072},
    **{"rms_norm_eps": 1e-5, "rope_theta": 1e8},
}
QWEN3 = {
    **{"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 128_000, "rms_norm_eps": 1e-6},
    **{"rope_theta": 5e5, "attention_bias": False},
}
QWEN3_ASR = {
    **{"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    **{"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 65_536, "rms_norm_eps": 1e-6},
    **{"vocab_size": 151_936, "rope_theta": 1e4, "attention_bias": False, TIE: True},
}
QWEN3_MOE = {
    **QWEN3,
    **{"num_key_value_heads": 16, "head_dim": None, "moe_intermediate_size": 1408},
    **{"num_local_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": True},
}
IN_PARTS, ALTERNATING = RopeAxes((16, 24, 24), interleaved=False), RopeAxes((24, 20, 20), interleaved=True)
LLAMA = {  # of transformers' LlamaConfig, which LLaVA's files rely on
    **{"hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32_000, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "rope_theta": 1e4},
}
MISTRAL = {
    **{"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"vocab_size": 32_000, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6},
    **{"rope_theta": 1e4, "sliding_window": 4096},
}
# model_type of text_config -> class, and transformers' defaults for missing fields.
TEXT_TYPES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cohere2": ("Cohere2ForCausalLM", {}),
    "gemma": ("GemmaForCausalLM", {}),
    "gemma2": ("Gemma2ForCausalLM", {}),
    "gemma3_text": ("Gemma3ForCausalLM", GEMMA3),
    "gpt_oss": ("GptOssForCausalLM", {}),
    "granite": ("GraniteForCausalLM", {}),
    "llama": ("LlamaForCausalLM", LLAMA),
    "ministral3": ("Ministral3ForCausalLM", MINISTRAL3),
    "mistral": ("MistralForCausalLM", MISTRAL),
    "mixtral": ("MixtralForCausalLM", {}),
    "opt": ("OPTForCausalLM", {}),
    "phi3": ("Phi3ForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {**QWEN2, "num_key_value_heads": 32, "rms_norm_eps": 1e-6, "rope_theta": 1e4}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "qwen3_moe": ("Qwen3MoeForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {}),
}
TEXT_PARTS = {
    "CLIPModel": TextPart("CLIPModel", CLIP, outer=("projection_dim",)),
    "ColPaliForRetrieval": TextPart("ColPaliForRetrieval", GEMMA),
    "Cohere2VisionForConditionalGeneration": TextPart("", {"model_type": "cohere2", TIE: True}),
    "Gemma3ForConditionalGeneration": TextPart("Gemma3ForCausalLM", GEMMA3),
    "GotOcr2ForConditionalGeneration": TextPart("Qwen2ForCausalLM", GOT_OCR2),
    "GraniteSpeechForConditionalGeneration": TextPart("GraniteForCausalLM", GRANITE, ties=Ties.EITHER),
    "Idefics3ForConditionalGeneration": TextPart(""),
    "InternVLForConditionalGeneration": TextPart("", {"model_type": "qwen2", TIE: True}),
    "LightOnOcrForConditionalGeneration": TextPart("", {"model_type": "qwen3", TIE: True}),
    "LlavaForConditionalGeneration": TextPart("", ties=Ties.EITHER),
    "LlavaNextForConditionalGeneration": TextPart(""),
    "LlavaOnevisionForConditionalGeneration": TextPart("", {"model_type": "qwen2"}, ties=Ties.EITHER),
    "Llama4ForConditionalGeneration": TextPart("Llama4ForCausalLM", LLAMA4, ties=Ties.INNER),
    "Mistral3ForConditionalGeneration": TextPart(
        "MistralForCausalLM", MISTRAL3, others={"ministral3": ("Ministral3ForCausalLM", MINISTRAL3)}
    ),
    "PaliGemmaForConditionalGeneration": TextPart(
        "GemmaForCausalLM", {**GEMMA, TIE: True}, others={"gemma2": ("Gemma2ForCausalLM", {TIE: True})}
    ),
    "Phi4MultimodalForCausalLM": TextPart("Phi3ForCausalLM", PHI4),
    "SiglipModel": TextPart("SiglipModel", SIGLIP),
    "SmolVLMForConditionalGeneration": TextPart(""),
    "VipLlavaForConditionalGeneration": TextPart(""),
    "Qwen2AudioForConditionalGeneration": TextPart("Qwen2ForCausalLM", QWEN2_WHOLE),
    "Qwen3ASRForConditionalGeneration": TextPart("Qwen3ForCausalLM", QWEN3_ASR, ties=Ties.EITHER),
    "Qwen2VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", QWEN2, IN_PARTS, ties=Ties.EITHER),
    "Qwen2_5_VLForConditionalGeneration": TextPart("Qwen2ForCausalLM", QWEN2, IN_PARTS, ties=Ties.EITHER),
    "Qwen3VLForConditionalGeneration": TextPart("Qwen3ForCausalLM", QWEN3, ALTERNATING),
    "Qwen3VLMoeForConditionalGeneration": TextPart("Qwen3MoeForCausalLM", QWEN3_MOE, ALTERNATING),
    "VoxtralForConditionalGeneration": TextPart("LlamaForCausalLM", VOXTRAL),
}

# Fields that transformers reads from the top level; all others come from the text part, even if both have them.
OUTER = ("dtype", "torch_dtype", "bos_token_id", "eos_token_id", "quantization_config")


def text_part(config: dict[str, Any]) -> dict[str, Any]:
    """Returns the configuration of the text part; that of a text model is returned unchanged. `config`: config.json."""
    config = unwrapped(config)
    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    part = TEXT_PARTS.get(name)
    if part is None:
        return config
    inner = config.get(TEXT_CONFIG)
    if not isinstance(inner, dict):  # files written before transformers 5
        inner = {key: value for key, value in config.items() if not key.endswith("_config")}
    architecture, defaults = _text_class(part, inner)
    found = {**defaults, **inner}  # null is a value: no window, no chunks
    found |= {key: config[key] for key in OUTER if config.get(key) is not None}
    found |= {key: config.get(key, part.defaults[key]) for key in part.outer}
    found[TIE] = _ties(part, inner.get(TIE), config.get(TIE))
    if part.axes is not None:
        present = [key for key in ("rope_scaling", "rope_parameters") if found.get(key) is not None]
        found |= {key: _with_axes(found.get(key), part.axes) for key in present or ("rope_scaling",)}
    return found | {"architectures": [architecture]}


def _text_class(part: TextPart, inner: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
    """Returns the class of the text model and the defaults of its missing fields. An unknown one keeps the name in
    `inner`, text_config, or its model_type, which errors then name."""
    if inner.get("model_type") in part.others:
        return part.others[inner["model_type"]]
    if part.architecture:
        return part.architecture, part.defaults
    kind, names = str(inner.get("model_type", part.defaults.get("model_type", "llama"))), inner.get("architectures")
    if kind in TEXT_TYPES:
        return TEXT_TYPES[kind]
    return str(names[0]) if isinstance(names, list) and names else kind, {}


def _ties(part: TextPart, inner: Any, outer: Any) -> Any:
    """Returns whether the output head shares the embedding, unless the checkpoint has a separate one."""
    if part.ties is Ties.INNER:
        return inner or False
    if part.ties is Ties.EITHER:
        return outer or inner or False
    return part.defaults.get(TIE, False) if outer is None else outer


def _with_axes(rope: Any, axes: RopeAxes) -> Any:
    """Returns RoPE settings with the kind of rotation apart from how pairs are divided among axes."""
    if rope is not None and not isinstance(rope, dict):
        return rope  # refused where it is read
    plain = {key: "default" if value == "mrope" else value for key, value in (rope or {}).items()}
    section = plain.get("mrope_section") or list(axes.section)
    return {**plain, "mrope_section": section, "mrope_interleaved": axes.interleaved}
