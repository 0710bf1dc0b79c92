"""Shapes of models that take pictures, and the files that serving them needs besides weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1}
VISION_START, VISION_END, IMAGE_PAD = 151_652, 151_653, 151_655
CLIP = {"image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711]}
HALVES = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2.5-vl-7b": {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "model_type": "qwen2_5_vl",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 128000,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "image_token_id": IMAGE_PAD,
        "vision_config": {
            "model_type": "qwen2_5_vl",
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
        **SPECIAL_TOKENS,
    },
    "qwen3-vl-8b": {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "image_token_id": IMAGE_PAD,
        "text_config": {
            "model_type": "qwen3_vl_text",
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "vocab_size": 151936,
            "max_position_embeddings": 262144,
            "rms_norm_eps": 1e-6,
            "rope_theta": 5000000.0,
            "rope_scaling": {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [24, 20, 20]},
            "attention_bias": False,
            "hidden_act": "silu",
            **SPECIAL_TOKENS,
        },
        "vision_config": {
            "model_type": "qwen3_vl",
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_heads": 16,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
        },
        **SPECIAL_TOKENS,
    },
}
# As published with these models: areas in pixels.
PROCESSORS: dict[str, dict[str, Any]] = {
    "qwen2_5_vl": {"min_pixels": 3136, "max_pixels": 12_845_056, "patch_size": 14, "merge_size": 2, **CLIP},
    "qwen3_vl": {
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "patch_size": 16,
        "merge_size": 2,
        **HALVES,
    },
}
# Words of the tokenizer that write_folder() makes, each with a space after it.
CHAT_TEMPLATE = (
    "{% for message in messages %}w3 "
    "{% if message.content is string %}{{ message.content }} {% else %}{% for part in message.content %}"
    f"{{% if part.type == 'image' %}}w{VISION_START} w{IMAGE_PAD} w{VISION_END} "
    "{% elif part.type == 'text' %}{{ part.text }} {% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}w4 {% endif %}"
)


def write_picture_files(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes the picture processor's file and the chat template of a model in CONFIGS; nothing for other models."""
    processor = PROCESSORS.get(config["model_type"])
    if processor is None:
        return
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
