"""Bounds of the sizes in config.json, checked before use.

A folder of a few bytes must not cause a list of a billion layers or a tensor of negative size.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire.services.worker.layers.config_file import refusal

MAX_LAYERS, MAX_WIDTH, MAX_HEADS, MAX_POSITIONS = 4096, 1 << 20, 1 << 14, 1 << 30
LAYERS, WIDTH, HEADS, POSITIONS = (1, MAX_LAYERS), (1, MAX_WIDTH), (1, MAX_HEADS), (1, MAX_POSITIONS)

# Inclusive bounds, by the names that families use for the same size.
BOUNDS: Mapping[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "head_dim", "word_embed_proj_dim"), WIDTH),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "intermediate_size_mlp"), WIDTH),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), WIDTH),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_key_value_heads"), HEADS),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_n_groups"), HEADS),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "mamba_d_state", "mamba_d_head"), WIDTH),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), WIDTH),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), POSITIONS),
    "original_max_position_embeddings": POSITIONS,
    "sliding_window": (-1, MAX_POSITIONS),
    "attention_chunk_size": (1, MAX_POSITIONS),
    "q_lora_rank": (0, MAX_WIDTH),
    "num_labels": (1, 1 << 20),
    "type_vocab_size": (0, 1 << 20),
}

# The same for vision_config.
VISION_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "out_hidden_size", "intermediate_size"), WIDTH),
    **dict.fromkeys(("depth", "num_hidden_layers"), LAYERS),
    **dict.fromkeys(("num_heads", "num_attention_heads"), HEADS),
    **dict.fromkeys(("patch_size", "window_size"), (1, 1 << 14)),
    **dict.fromkeys(("spatial_merge_size", "temporal_patch_size"), (1, 1 << 6)),
    "num_position_embeddings": (1, 1 << 24),
}

# The same for audio_config.
AUDIO_BOUNDS: Mapping[str, tuple[int, int]] = {
    **dict.fromkeys(("d_model", "hidden_size", "encoder_ffn_dim", "intermediate_size"), WIDTH),
    **dict.fromkeys(("encoder_layers", "num_hidden_layers"), LAYERS),
    **dict.fromkeys(("encoder_attention_heads", "num_attention_heads"), HEADS),
    "num_mel_bins": (1, 1 << 12),
    "max_source_positions": (1, 1 << 16),
}


def check_sizes(values: Mapping[str, Any], bounds: Mapping[str, tuple[int, int]] = BOUNDS) -> None:
    """Raises InvalidArgument, naming field, value and bounds, for a size in config.json outside `bounds`.

    Values that are no integers are left to their readers.
    """
    for name, (least, most) in bounds.items():
        value = values.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and not least <= value <= most:
            raise refusal(name, _short(value), f"must be from {least} to {most}")


def _short(value: int) -> Any:
    return value if abs(value) < 1 << 64 else "a number beyond 64 bits"
