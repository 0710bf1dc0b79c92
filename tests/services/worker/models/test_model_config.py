"""config.json in the formats of transformers 4 and 5, and rejection of unsupported features."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from quire.services.worker.layers.config_file import ConfigFile
from quire.services.worker.models.config.decoder_config import DecoderConfig
from quire.services.worker.models.config.rope_config import RopeConfig, read_rope
from quire.services.worker.models.families import cohere
from quire.services.worker.models.families.falcon_h1 import FalconH1Config
from quire.services.worker.models.families.llama4 import Llama4Config
from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import InvalidArgument

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
}
QWEN2 = {**BASE, "architectures": ["Qwen2ForCausalLM"]}


GEMMA2 = {"architectures": ["Gemma2ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}
GEMMA3 = {"architectures": ["Gemma3ForCausalLM"], "hidden_activation": "gelu_pytorch_tanh"}

FALCON_H1 = {"architectures": ["FalconH1ForCausalLM"], "mamba_d_ssm": 48, "mamba_n_heads": 6}


def read(**changes: Any) -> DecoderConfig:
    return read_model_config({**BASE, **changes})


def test_sizes() -> None:
    config = read(torch_dtype="bfloat16")
    assert (config.head_dim, config.num_kv_heads, config.dtype) == (16, 2, "bfloat16")
    assert read(head_dim=32).head_dim == 32
    assert read(head_dim=None).head_dim == 16
    assert read(num_key_value_heads=None).num_kv_heads == 4
    assert read(dtype="float16").dtype == "float16"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 5e5}, {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}),
        (
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
        ),
        (
            {
                "rope_theta": 1e6,
                "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            },
            {
                "rope_parameters": {
                    "rope_type": "yarn",
                    "rope_theta": 1e6,
                    "factor": 4.0,
                    "original_max_position_embeddings": 128,
                }
            },
        ),
    ],
)
def test_old_and_new_spellings_of_rope_mean_the_same(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert read(**old) == read(**new)


def test_rope_defaults() -> None:
    assert read().rope == RopeConfig(theta=10_000.0)
    assert read(rope_scaling=None, rope_theta=7.0).rope == RopeConfig(theta=7.0)


def test_stretched_positions_allow_longer_sequences() -> None:
    assert read().max_positions == 512
    assert read(rope_scaling={"type": "linear", "factor": 2.0}).max_positions == 1024
    yarn = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert read(rope_scaling=yarn).max_positions == 2048


def test_mistral_windows_are_on_every_layer() -> None:
    config = read(architectures=["MistralForCausalLM"], sliding_window=33)
    assert config.sliding_windows == (33, 33, 33)
    assert read(architectures=["MistralForCausalLM"], sliding_window=None).sliding_windows == (0, 0, 0)


def test_qwen_windows_come_from_layer_types_or_from_the_first_windowed_layer() -> None:
    def windows(**changes: Any) -> tuple[int, ...]:
        return read_model_config({**QWEN2, "sliding_window": 8, **changes}).sliding_windows

    assert windows(use_sliding_window=False) == (0, 0, 0)
    assert windows(use_sliding_window=True, max_window_layers=2) == (0, 0, 8)
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(use_sliding_window=True, layer_types=types) == (8, 0, 8)


def test_biases_and_norms_by_family() -> None:
    def traits(architecture: str, **changes: Any) -> tuple[bool, bool, bool, bool]:
        config = read(architectures=[architecture], **changes)
        return config.attention.qkv_bias, config.attention.o_bias, config.feed_forward.bias, config.attention.qk_norm

    assert traits("LlamaForCausalLM") == (False, False, False, False)
    assert traits("LlamaForCausalLM", attention_bias=True, mlp_bias=True) == (True, True, True, False)
    assert traits("MistralForCausalLM") == (False, False, False, False)
    assert traits("Qwen2ForCausalLM") == (True, False, False, False)
    assert traits("Qwen3ForCausalLM") == (False, False, False, True)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"architectures": ["MarianMTModel"]},
            "Marian.*supported: .*LlamaForCausalLM, M",
        ),
        ({"architectures": None}, "supported: .*LlamaForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config.bits is None: supported: 4, 8"),
        (
            {"rope_scaling": {"type": "bent", "factor": 2.0}},
            "'bent': supported: default, linear, dynamic, llama3, yarn, long",
        ),
        ({"rope_parameters": {"rope_type": "longrope"}}, "short_factor is None"),
        ({"architectures": ["OPTForCausalLM"], "word_embed_proj_dim": 7}, "word_embed_proj_dim is 7"),
        ({"architectures": ["CohereForCausalLM"], "use_qk_norm": True}, "use_qk_norm is True"),
        ({**GEMMA3, "layer_types": ["full_attention"]}, "layer_types is"),
        ({**GEMMA2, "attn_logit_softcapping": -1}, "attn_logit_softcapping is -1"),
        ({**GEMMA2, "layer_types": ["chunked_attention"]}, "layer_types is"),
        ({"architectures": ["GraniteForCausalLM"], "logits_scaling": 0}, "logits_scaling is 0"),
        ({**FALCON_H1, "key_multiplier": 0}, "key_multiplier is 0.0: a finite number other than 0"),
        ({**FALCON_H1, "embedding_multiplier": float("nan")}, "embedding_multiplier is nan"),
        ({**FALCON_H1, "mlp_multipliers": [1.0]}, r"mlp_multipliers is \[1.0\]: 2 finite numbers"),
        ({**FALCON_H1, "ssm_multipliers": 0.5}, "ssm_multipliers is 0.5: a list of numbers"),
        ({**FALCON_H1, "mamba_n_heads": 5}, "mamba_n_heads is 5: must divide mamba_d_ssm, 48"),
        ({**FALCON_H1, "mamba_d_ssm": None}, r"mamba_n_heads is 6: must divide mamba_expand \* hidden_size, 128"),
        ({**FALCON_H1, "mamba_d_head": 6}, "mamba_d_head is 6: 6 heads share 48 elements, 8 each"),
        ({**FALCON_H1, "mamba_n_groups": 4}, "mamba_n_groups is 4: must divide mamba_n_heads, 6"),
        ({**FALCON_H1, "time_step_limit": [0.0, 0.1]}, "time_step_limit is"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_scaling": {"type": "linear"}}, "factor is None"),
        ({"vocab_size": None}, "vocab_size is None"),
        ({"num_attention_heads": "4"}, "num_attention_heads is '4'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3: must divide"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes'"),
        ({"rope_parameters": [1]}, "an object is needed"),
    ],
)
def test_unsupported_configs_are_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        read(**changes)


def test_gemma_2_defaults_are_those_of_the_published_models() -> None:
    config = read(**GEMMA2, num_hidden_layers=4)
    assert (config.attention.softcap, config.scales.logit_cap) == (50, 30)
    assert config.sliding_windows == (4096, 0, 4096, 0)
    assert read(**GEMMA2, final_logit_softcapping=None).scales.logit_cap == 0


def test_su_is_an_alias_of_longrope() -> None:
    """Early config files of Phi-3 128k call it su (vllm#9481)."""
    factors = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64}
    named = [
        read_rope(ConfigFile({"max_position_embeddings": 256, "rope_scaling": {"type": kind, **factors}}))
        for kind in ("su", "longrope")
    ]
    assert named[0] == named[1]
    assert named[0].kind == "longrope"


def test_family_fields_are_not_in_the_common_config() -> None:
    names = {field.name for field in fields(DecoderConfig)}
    worker = Path(cohere.__file__).parents[2]
    everywhere = "".join(
        path.read_text() for path in worker.rglob("*.py") if path.parent.name not in ("families", "config")
    )
    assert {name for name in names if f".{name}" not in everywhere} == set()
    own = {field.name for family in (Llama4Config, FalconH1Config) for field in fields(family)} - names
    assert own == {"unit_queries", "temperature", "multipliers"}
