"""Llama 4: its config.json fields and layers. Its texts are compared in tests/kv_groups."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import kernels
from quire.services.worker.layers.placement import LayerPlacement
from quire.services.worker.models.config.rope_config import NO_ROPE
from quire.services.worker.models.families.llama4 import AttentionTemperature, Llama4Config, Llama4Experts
from quire.services.worker.models.loading.dummy_weights import fill_dummy
from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config
from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint
from tests.services.worker.models.test_logits import MAX_ERROR, MAX_ERROR_BFLOAT16, error, errors, prompt
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

# As published: numeric flags, empty lists that mean the defaults.
SCOUT: dict[str, Any] = {
    **{"model_type": "llama4_text", "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16384},
    **{"num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128},
    **{"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1, "no_rope_layers": []},
    **{"attention_chunk_size": 8192, "attn_temperature_tuning": 4, "floor_scale": 8192, "attn_scale": 0.1},
    **{"max_position_embeddings": 10_485_760, "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "vocab_size": 202_048},
    "rope_scaling": {
        **{"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3"},
        "original_max_position_embeddings": 8192,
    },
    "use_qk_norm": True,
}


def read(**changes: Any) -> Llama4Config:
    config = read_model_config({"architectures": ["Llama4ForCausalLM"], **SCOUT, **changes})
    assert isinstance(config, Llama4Config)
    return config


def test_published_configs_omit_defaults(tmp_path: Path) -> None:
    outer = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": SCOUT, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "vision_config": {"hidden_size": 7}}))
    config = read_model_config(read_config(tmp_path))
    assert isinstance(config, Llama4Config)
    assert config.experts is not None
    assert config.sliding_windows == (8192, 8192, 8192, 0) * 12
    assert [rope == NO_ROPE for rope in config.ropes] == [False, False, False, True] * 12
    assert (config.unit_queries, config.temperature, config.dtype) == (
        True,
        AttentionTemperature(0.1, 8192),
        "bfloat16",
    )
    assert config.experts.sparse_layers == (True,) * 48
    assert (config.experts.intermediate_size, config.experts.shared_intermediate_size) == (8192, 8192)


def test_layers_follow_the_config() -> None:
    some = read(num_hidden_layers=4, interleave_moe_layer_step=2, attn_temperature_tuning=False, use_qk_norm=False)
    assert some.experts is not None
    assert (some.experts.sparse_layers, some.intermediate_size) == ((False, True, False, True), 16384)
    assert (some.temperature, some.unit_queries) == (None, False)
    told = read(num_hidden_layers=4, moe_layers=[0], no_rope_layers=[1, 0, 1, 1])
    assert told.experts is not None
    assert told.experts.sparse_layers == (True, False, False, False)
    assert told.sliding_windows == (8192, 0, 8192, 8192)
    kinds = ["chunked_attention", "chunked_attention", "full_attention", "full_attention"]
    assert read(num_hidden_layers=4, layer_types=kinds).sliding_windows == (8192, 8192, 0, 0)
    assert read(num_hidden_layers=4, attention_chunk_size=None).sliding_windows == (0,) * 4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"attention_chunk_size": 1}, "attention_chunk_size is 1: must be 2 or more"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 48},
            "attention_chunk_size is None: must",
        ),
        ({"layer_types": ["sliding_attention"] * 48}, "chunked_attention or full_attention is needed for each of 48"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers is [1, 0]: 0 or 1 is needed for each of 48 layers"),
        ({"no_rope_layer_interval": 0}, "no_rope_layer_interval is 0: must be 1 or more"),
        ({"num_experts_per_tok": 2}, "num_experts_per_tok is 2: it must be 1"),
        ({"moe_layers": [48]}, "moe_layers is [48]: a list of layers, 0 to 47, is needed"),
        ({"interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0: must be 1 or more"),
        ({"floor_scale": 0}, "floor_scale is 0: must be 1 or more"),
        ({"attn_temperature_tuning": "on"}, "attn_temperature_tuning is 'on': true or false is needed"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn': it scales queries and keys"),
    ],
)
def test_invalid_configs_are_rejected(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        read(**changes)
    assert text in str(refused.value)


def test_a_model_without_experts(tmp_path: Path) -> None:
    made = checkpoints.make("llama4", tmp_path, moe_layers=[])
    rig = Rig(made.folder)
    rig.step([New(0, prompt(21))], {0: 21})
    rig.step()
    assert error(rig, made, 0) < MAX_ERROR


def test_bfloat16_by_compiled_kernels(checkpoint: Callable[[str], Checkpoint]) -> None:
    """Tokens whose two best experts have similar scores may be routed differently; most are not."""
    made = checkpoint("llama4")
    rig = Rig(made.folder, dtype="bfloat16", attention_backend="auto", num_blocks=400)
    for slot in range(8):
        rig.step([New(slot, prompt(11, slot))], {slot: 11})
    rig.step()
    spread = float(made.logits(rig.tokens(0)).std())
    apart = torch.cat([errors(rig, made, slot) for slot in range(8)])
    assert float(apart.median()) < MAX_ERROR_BFLOAT16 * spread


def test_dummy_weights_are_scaled_by_their_fan_in() -> None:
    """Includes expert weights, which are stored transposed."""
    config = read(num_hidden_layers=1, hidden_size=64, intermediate_size=96).experts
    assert config is not None
    place = LayerPlacement(kernels.load("cpu"), torch.float32, torch.device("cpu"))
    experts = Llama4Experts("experts", 64, config, place)

    class Unpacked:
        destinations = experts.destinations

        def finish(self) -> None: ...

    fill_dummy(Unpacked(), seed=3)
    found = dict(experts.destinations())
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "experts.gate_up_proj": (16, 64, 192),
        "experts.down_proj": (16, 96, 64),
    }
    for tensor in found.values():
        assert float(tensor.std()) == pytest.approx(tensor.size(1) ** -0.5, rel=0.02)
