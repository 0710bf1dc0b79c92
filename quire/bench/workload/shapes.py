"""Models for benchmarks: the bundled one, the shape of a well-known one with random weights, or a folder."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire import bundled
from quire.bench.workload import picture_shapes, sound_shapes
from quire.checkpoints.quantize import quantization_config
from quire.shared.errors import InvalidArgument
from quire.shared.models.text_part import text_part

TINY = "tiny"
SPECIAL_TOKENS = {"bos_token_id": 0, "eos_token_id": 1}

CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **SPECIAL_TOKENS,
    },
    "qwen3-30b-a3b": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "vocab_size": 151936,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        **SPECIAL_TOKENS,
    },
    "llama3-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
        **SPECIAL_TOKENS,
    },
}

CONFIGS["llama3-70b"] = {
    **CONFIGS["llama3-8b"],
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}

CONFIGS["llama3-8b-awq"] = {
    **CONFIGS["llama3-8b"],
    "quantization_config": {
        "quant_method": "awq",
        "version": "gemm",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "modules_to_not_convert": None,
    },
}

CONFIGS["qwen3-1.7b"] = {**CONFIGS["qwen3-0.6b"], "hidden_size": 2048, "intermediate_size": 6144}

# Configuration that `quire quantize --to KIND --lm-head` writes for these shapes.
for _shape, _kind in itertools.product(("qwen3-0.6b", "qwen3-1.7b"), ("int8", "w4a16")):
    CONFIGS[f"{_shape}-{_kind}"] = {
        **CONFIGS[_shape],
        "tie_word_embeddings": False,
        "quantization_config": quantization_config(_kind, 128 if _kind == "w4a16" else 0, head=True),
    }

# A quarter of the layers of Qwen3-Next-80B-A3B, to fit on one GPU with 80 GB.
CONFIGS["qwen3-next-12-layers"] = {
    **CONFIGS["qwen3-30b-a3b"],
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "intermediate_size": 5632,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 12,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "rope_theta": 10000000.0,
    "max_position_embeddings": 262144,
}

CONFIGS["deepseek-v2-lite"] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "first_k_dense_replace": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "vocab_size": 102400,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
    },
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 163840,
    "hidden_act": "silu",
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    **SPECIAL_TOKENS,
}

CONFIGS["bert-base"] = {
    "architectures": ["BertModel"],
    "model_type": "bert",
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_act": "gelu",
    "torch_dtype": "bfloat16",
    **SPECIAL_TOKENS,
}
CONFIGS["bert-large"] = {
    **CONFIGS["bert-base"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
}
CONFIGS |= picture_shapes.CONFIGS | sound_shapes.CONFIGS

DRAFTER_FIELDS = (  # fields that an EAGLE head shares with its model
    "hidden_size",
    "vocab_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
)
EAGLE_NORMS = {"add_para_norm": True, "skip_prenorm": False, "skip_output_norm": False}  # as in the bundled head
EPILOG = f"MODEL may also be {TINY} (the bundled one), or {', '.join(CONFIGS)} (random weights); several: A,B,..."


@dataclass(frozen=True, slots=True)
class BenchShape:
    """A model to serve; `folder` is None for the bundled one."""

    name: str
    vocab_size: int
    folder: Path | None = None
    random_weights: bool = False


def prepare(name: str, scratch: Path) -> BenchShape:
    """Returns the shape called `name`, or the model in that folder. Generated files are written under `scratch`."""
    if name in ("", TINY):
        return BenchShape(TINY, _vocab_size(bundled.FOLDER))
    if name in CONFIGS:
        folder = scratch / name
        write_folder(folder, CONFIGS[name])
        return BenchShape(name, text_part(CONFIGS[name])["vocab_size"], folder, random_weights=True)
    folder = Path(name).expanduser()
    if not (folder / "config.json").is_file():
        known = ", ".join((TINY, *CONFIGS))
        raise InvalidArgument(
            f"model: {name!r} is not a folder with a config.json; shapes with random weights: {known}", field="model"
        )
    return BenchShape(folder.resolve().name, _vocab_size(folder), folder)


def drafters(shape: BenchShape, scratch: Path) -> Path:
    """Returns a folder for each kind of drafter of `shape`: bundled, or generated if the model's weights are random."""
    if not shape.random_weights:
        return bundled.FOLDER.parent / "drafters"
    config = text_part(CONFIGS[shape.name])
    of_model = {name: config[name] for name in DRAFTER_FIELDS}
    small = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2, "num_attention_heads": 4}
    made_up = {
        "draft": {**config, **small, "num_key_value_heads": 2, "head_dim": 64, "tie_word_embeddings": True},
        "eagle": {**of_model, "architectures": ["EagleQwen3ForCausalLM"], "num_hidden_layers": 1, **EAGLE_NORMS},
        "medusa": {"architectures": ["MedusaModel"], "medusa_num_heads": 4},
    }
    for kind, values in made_up.items():
        folder = scratch / f"{shape.name}-drafters" / kind
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(values))
    return scratch / f"{shape.name}-drafters"


def write_folder(folder: Path, config: Mapping[str, Any]) -> None:
    """Writes everything a server needs except weights. The text of token i is `w<i>`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = text_part(dict(config))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "w0", "eos_token": "w1", "unk_token": "w2"}
    files = {
        "config.json": config,
        "generation_config.json": SPECIAL_TOKENS,
        "tokenizer.json": word_tokenizer(text["vocab_size"], sound_shapes.named_tokens(config)),
        "tokenizer_config.json": {**names, "model_max_length": _longest(text)},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    picture_shapes.write_picture_files(folder, config)
    sound_shapes.write_sound_files(folder, config)


def _longest(text: Mapping[str, Any]) -> int:
    """Returns the number of positions of a model, or of its decoder."""
    return int(text.get("max_position_embeddings") or text["max_target_positions"])


def word_tokenizer(vocab_size: int, special: Mapping[str, int] | None = None) -> dict[str, Any]:
    """Returns a tokenizer.json of whole words, split at white space. `special`: ids of special tokens by name."""
    named = special or {}
    words = {f"w{i}": i for i in range(vocab_size) if i not in named.values()}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": name, **flags} for name, i in named.items()],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": {**words, **named}, "unk_token": "w2"},
    }


def _vocab_size(folder: Path) -> int:
    return int(text_part(json.loads((folder / "config.json").read_text()))["vocab_size"])
