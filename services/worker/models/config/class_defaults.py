"""Defaults of config.json fields for classes of transformers that differ from the common ones.

No tensor reveals them: with a wrong default a model loads and gives other answers. An explicit null is a value of its
own (no window, as many key heads as query heads) that no default replaces.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

KV, EPS, HEAD_DIM, THETA = "num_key_value_heads", "rms_norm_eps", "head_dim", "rope_theta"
ROPE_FIELDS = ("rope_parameters", "rope_scaling", THETA)

GLM = {KV: 2, EPS: 1.5625e-07, HEAD_DIM: 128, "attention_bias": True}
GPT_OSS_ROPE = {
    **{"rope_type": "yarn", THETA: 150_000.0, "factor": 32.0, "original_max_position_embeddings": 4096},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
}
DEEPSEEK_V3 = {
    **{KV: 128, "first_k_dense_replace": 3, "n_shared_experts": 1, "n_group": 8, "topk_group": 4},
    **{"q_lora_rank": 1536},
}
MINISTRAL3_ROPE = {
    **{"rope_type": "yarn", THETA: 1e6, "factor": 16.0, "original_max_position_embeddings": 16_384},
    **{"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "CohereForCausalLM": {THETA: 500_000.0},
    "DeepseekV2ForCausalLM": {"n_shared_experts": 2, "q_lora_rank": 1536},
    "DeepseekV3ForCausalLM": DEEPSEEK_V3,
    "Gemma2ForCausalLM": {KV: 4, HEAD_DIM: 256},
    "Gemma3ForCausalLM": {KV: 4, HEAD_DIM: 256},
    "GemmaForCausalLM": {KV: 16, HEAD_DIM: 256},
    "Glm4ForCausalLM": GLM,
    "GlmForCausalLM": GLM,
    "GptOssForCausalLM": {KV: 8, EPS: 1e-5, HEAD_DIM: 64, "rope_parameters": GPT_OSS_ROPE, THETA: 150_000.0},
    "Llama4ForCausalLM": {KV: 8, HEAD_DIM: 128},
    "Ministral3ForCausalLM": {KV: 8, EPS: 1e-5, HEAD_DIM: 128, "rope_parameters": MINISTRAL3_ROPE},
    "MistralForCausalLM": {KV: 8, "sliding_window": 4096},
    "MixtralForCausalLM": {KV: 8, EPS: 1e-5, THETA: 1e6},
    "Olmo2ForCausalLM": {EPS: 1e-5},
    "OlmoeForCausalLM": {EPS: 1e-5},
    "Phi3ForCausalLM": {EPS: 1e-5},
    "Qwen2ForCausalLM": {KV: 32, "sliding_window": 4096},
    "Qwen2MoeForCausalLM": {KV: 16},
    "Qwen3ForCausalLM": {KV: 32, HEAD_DIM: 128},
    "Qwen3MoeForCausalLM": {KV: 4},
    "SmolLM3ForCausalLM": {KV: 4, THETA: 2e6, "tie_word_embeddings": True},
    "Starcoder2ForCausalLM": {KV: 2},
}


def with_defaults(values: Mapping[str, Any], architecture: str) -> dict[str, Any]:
    """Returns config.json's `values`, completed by the defaults of the architecture's class; given values, null
    included, stay.

    Defaults of a whole rope section apply only if config.json has no rope fields.
    """
    defaults = dict(DEFAULTS.get(architecture, {}))
    if any(name in values for name in ROPE_FIELDS):
        defaults.pop("rope_parameters", None)
    heads, kv_heads = values.get("num_attention_heads"), defaults.get(KV)
    if kv_heads and (not isinstance(heads, int) or heads % kv_heads):
        defaults.pop(KV)  # the class rejects such a model; tensors give the number
    return {**defaults, **values}
