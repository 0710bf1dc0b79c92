"""Small random models of each family, as Hugging Face folders and as the transformers models that made them."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

VOCAB_SIZE = 211  # odd sizes find wrong strides
SHAPE = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}
MINISTRAL3 = {
    **{**YARN, "original_max_position_embeddings": 7, "beta_fast": 32.0, "beta_slow": 1.0},
    **{"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.4},
}
THREE_QUARTERS = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
PHI3 = {"pad_token_id": 0, "num_key_value_heads": 3}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0, 1.2, 1.4, 1.7],
    "long_factor": [1.5, 2.0, 3.0, 4.5],
    "original_max_position_embeddings": 2,
}
ALTERNATING = ["sliding_attention", "full_attention"] * 2
FOUR_LAYERS = {"num_hidden_layers": 4, "layer_types": ALTERNATING, "sliding_window": 9}
GEMMA3 = {
    **FOUR_LAYERS,
    "query_pre_attn_scalar": 24,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e5, "factor": 2.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e3},
    },
}
GEMMA2 = {**FOUR_LAYERS, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0}
LLAMA4 = {
    **{"num_hidden_layers": 4, "attention_chunk_size": 9, "no_rope_layer_interval": 3, "num_local_experts": 4},
    **{"intermediate_size_mlp": 72, "floor_scale": 5, "attn_scale": 0.4},
    "rope_parameters": {**LLAMA3, "high_freq_factor": 1.0},  # as published
}
SMALL_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
LATENT = {
    **{"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_shared_experts": 2},
    **{"first_k_dense_replace": 1, "q_lora_rank": 20, "kv_lora_rank": 24, "num_key_value_heads": 6},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 14, "head_dim": 8},
}
GROUPS = {"n_group": 4, "topk_group": 2}

# Name -> (class prefix in transformers, configuration beyond SHAPE)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama-derived-head-dim": ("Llama", {"head_dim": None, "num_key_value_heads": 6}),
    "llama-llama3-rope": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-linear-rope": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}}),
    "llama-biases-tied": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    "mistral-window": ("Mistral", {"sliding_window": 9}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "ministral3": ("Ministral3", {"pad_token_id": 0, "rope_parameters": MINISTRAL3}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}),
    "olmo2": ("Olmo2", {"attention_bias": False}),
    "olmo2-tied-heads": ("Olmo2", {"tie_word_embeddings": True, "num_key_value_heads": 6}),
    "granite": (
        "Granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.3,
            "logits_scaling": 2.0,
            "attention_bias": True,
        },
    ),
    "granite-tied": ("Granite", {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "tie_word_embeddings": True}),
    "gemma-tied": ("Gemma", {"hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", GEMMA2),
    "gemma2-caps-off": ("Gemma2", {**GEMMA2, "attn_logit_softcapping": None, "final_logit_softcapping": None}),
    "gemma3-tied": ("Gemma3Text", {**GEMMA3, "tie_word_embeddings": True}),
    "glm": ("Glm", {"pad_token_id": 0, "attention_bias": True}),
    "glm4": ("Glm4", {"pad_token_id": 0, "attention_bias": True, "num_key_value_heads": 3}),
    "phi3-window": ("Phi3", {**PHI3, "sliding_window": 9}),
    "phi3-longrope": ("Phi3", {**PHI3, "head_dim": 8, "rope_parameters": LONGROPE}),
    "phi3-partial": ("Phi3", {**PHI3, "rope_parameters": THREE_QUARTERS}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "pad_token_id": 0}),
    "cohere": ("Cohere", {"logit_scale": 0.3, "pad_token_id": 0}),
    "cohere2": ("Cohere2", {**FOUR_LAYERS, "pad_token_id": 0}),
    "starcoder2": ("Starcoder2", {"head_dim": 8, "sliding_window": 9, "hidden_act": "gelu_pytorch_tanh"}),
    "gpt2": ("GPT2", {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 256}),
    "opt": ("OPT", {"ffn_dim": 88, "word_embed_proj_dim": 48, "enable_bias": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "sliding_window": 9}),
    "deepseek-v2": ("DeepseekV2", {**LATENT, "q_lora_rank": None, "routed_scaling_factor": 1.5}),
    "deepseek-v2-groups": (
        "DeepseekV2",
        {**LATENT, **GROUPS, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0},
    ),
    "deepseek-v3": ("DeepseekV3", {**LATENT, **GROUPS}),
    "deepseek-v3-yarn": (
        "DeepseekV3",
        {
            **{**LATENT, "n_group": 1, "topk_group": 1, "rope_interleave": False, "v_head_dim": 12},
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.8},
        },
    ),
    "llama4": ("Llama4Text", LLAMA4),
    "llama4-dense-layers": (
        "Llama4Text",
        {
            **{**LLAMA4, "moe_layers": [1, 3], "no_rope_layers": [1, 0, 0, 1], "use_qk_norm": False},
            **{"attention_bias": True, "attn_temperature_tuning": False, "attention_chunk_size": 16},
        },
    ),
    "gpt-oss": (
        "GptOss",
        {
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 9, "swiglu_limit": 1.5},
            "rope_parameters": {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        },
    ),
    "granite-moe": (
        "GraniteMoe",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "embedding_multiplier": 2.0, "logits_scaling": 3.0},
            **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "head_dim": 8, "tie_word_embeddings": True},
        },
    ),
    "olmoe": ("Olmoe", {"num_experts": 8, "num_experts_per_tok": 3, "head_dim": 8}),
    "qwen2-moe": ("Qwen2Moe", {**SMALL_EXPERTS, "shared_expert_intermediate_size": 56, "mlp_only_layers": [1]}),
    "qwen3-moe-tied": ("Qwen3Moe", {**SMALL_EXPERTS, "norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3-moe-some-layers": (
        "Qwen3Moe",
        {**SMALL_EXPERTS, "num_experts": 16, "num_experts_per_tok": 5, "decoder_sparse_step": 2},
    ),
    # By the code of transformers:
    "gpt-neox": ("GPTNeoX", {"head_dim": 8, "num_key_value_heads": None}),
    "phi": ("Phi", {"head_dim": 8, "partial_rotary_factor": 0.5}),
    "stablelm": ("StableLm", {"head_dim": 8}),
    "olmo3": ("Olmo3", {**FOUR_LAYERS, "head_dim": 8}),
    "seed-oss": ("SeedOss", {}),
    "qwen3-yarn": ("Qwen3", {"rope_parameters": YARN, "attention_bias": True}),
}

HYBRID = {
    **{**SMALL_EXPERTS, "shared_expert_intermediate_size": 56, "norm_topk_prob": True, "num_hidden_layers": 4},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 6},
}
RECURRENT, ATTENTION = "linear_attention", "full_attention"
SPACE = {
    **{"embedding_multiplier": 2.0, "logits_scaling": 3.0, "residual_multiplier": 0.4, "attention_multiplier": 0.2},
    **{"mamba_n_heads": 6, "mamba_n_groups": 2, "mamba_d_state": 4, "mamba_d_head": 8, "mamba_expand": 1},
    **{"num_local_experts": 0, "shared_intermediate_size": 56, "tie_word_embeddings": True, "head_dim": 8},
    **{"num_hidden_layers": 4, "layer_types": [RECURRENT, RECURRENT, ATTENTION, RECURRENT], "pad_token_id": 0},
    "num_key_value_heads": 3,
}
PARALLEL = {  # 4 positions hold it
    **{
        "num_key_value_heads": 3,
        "mamba_n_heads": 6,
        "mamba_n_groups": 2,
        "mamba_d_state": 4,
        "mamba_d_ssm": 36,
        "pad_token_id": 0,
    },
    **{"embedding_multiplier": 2.0, "lm_head_multiplier": 0.4, "key_multiplier": 0.3, "mlp_multipliers": [0.7, 0.4]},
    **{"attention_in_multiplier": 1.2, "attention_out_multiplier": 0.8},
    **{"ssm_in_multiplier": 1.3, "ssm_out_multiplier": 0.6, "ssm_multipliers": [0.7, 0.5, 0.9, 1.4, 0.8]},
}
# Layers that keep a state, in place of keys and values or beside them: a page of 8 positions of theirs holds it.
RECURRENT_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3-next": ("Qwen3Next", HYBRID),
    "qwen3-next-tied": ("Qwen3Next", {**HYBRID, "tie_word_embeddings": True, "linear_conv_kernel_dim": 3}),
    "qwen3-next-narrow": (  # 4 positions hold it
        "Qwen3Next",
        {**HYBRID, "linear_num_key_heads": 1, "linear_num_value_heads": 3, "linear_key_head_dim": 4},
    ),
    "granite-hybrid": ("GraniteMoeHybrid", SPACE),
    "granite-hybrid-experts": (
        "GraniteMoeHybrid",
        {**SPACE, "num_local_experts": 6, "num_experts_per_tok": 2, "position_embedding_type": "rope"},
    ),
    "falcon-h1": ("FalconH1", PARALLEL),
    "falcon-h1-norms": (
        "FalconH1",
        {
            **{**PARALLEL, "mamba_d_ssm": None, "mamba_expand": 1, "mamba_rms_norm": True, "tie_word_embeddings": True},
            **{"attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True, "projectors_bias": True},
        },
    ),
    "qwen3-next-ends-recurrent": (
        "Qwen3Next",
        {
            **HYBRID,
            "num_hidden_layers": 3,
            "layer_types": [ATTENTION, RECURRENT, RECURRENT],
            "linear_num_value_heads": 2,
            "attention_bias": True,
            "mlp_only_layers": [1],
        },
    ),
}


@dataclass(frozen=True)
class Checkpoint:
    """A model and the folder it was saved to."""

    folder: Path
    model: Any

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Logits of transformers, float32 [num_tokens, vocab_size]."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0].float()


def _norms_by_group() -> bool:
    """Corrects transformers 5.17, which normalizes all groups of Granite's state spaces as one."""
    from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridRMSNormGated

    return "group_size" in inspect.signature(GraniteMoeHybridRMSNormGated.__init__).parameters


def make(
    family: str,
    folder: Path,
    *,
    classifies: bool = False,
    seed: int = 7,
    keeps_groups: bool = False,
    **overrides: Any,
) -> Checkpoint:
    """Makes a checkpoint with random weights large enough that every part of the model affects the logits.
    `classifies`: with a sequence classification head; `keeps_groups`: of state spaces, also where transformers computes
    something else with them."""
    prefix, extra = (FAMILIES | RECURRENT_FAMILIES)[family]
    config = getattr(transformers, f"{prefix}Config")(**{**SHAPE, **extra, **overrides})
    if prefix == "GraniteMoeHybrid" and not keeps_groups and not _norms_by_group():
        config.mamba_n_groups = 1
    config._attn_implementation = "eager"
    head = "ForSequenceClassification" if classifies else "LMHeadModel" if prefix == "GPT2" else "ForCausalLM"
    model = getattr(transformers, prefix.removesuffix("Text") + head)(config).eval()
    for part in model.modules():
        if hasattr(part, "limit") and hasattr(
            config, "swiglu_limit"
        ):  # which transformers 5.17 takes for 7 whatever it is
            part.limit = config.swiglu_limit
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        scale = 0.3 if parameter.dim() == 1 else 1.2 * parameter.size(-1) ** -0.5
        offset = 1.0 if parameter.dim() == 1 else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
    model.save_pretrained(folder)
    return Checkpoint(folder, model)
