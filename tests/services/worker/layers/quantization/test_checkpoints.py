"""Quantized checkpoints give the logits of their dequantized floats, or are rejected naming field or tensor.

float32 on the CPU, where activations are not quantized: as exact as unquantized checkpoints (test_logits.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from quire.services.worker.layers.quantization.fields import SECTION
from quire.services.worker.models.registry import read_model_config
from quire.shared.errors import InvalidArgument
from tests.services.worker.layers.quantization import layouts as quantized
from tests.services.worker.layers.quantization.layouts import (
    GPTQ,
    LAYOUTS,
    NF4_CONFIG,
    W4,
    WEIGHTS,
    compressed,
    weights,
)
from tests.services.worker.plans import New
from tests.services.worker.rig import Rig

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
MAX_ERROR = 1e-4

layouts = pytest.mark.parametrize("layout", LAYOUTS)


def largest_error(folder: Path, made: quantized.Checkpoint) -> float:
    rig = Rig(folder)
    rig.step([New(0, PROMPT)], {0: 8})
    for count in (3, 1, 1):
        rig.step(counts={0: count})
    rows, tokens = torch.stack(rig.logits[0]), rig.tokens(0)
    return float((rows - made.logits(tokens)[len(tokens) - len(rows) - 1 : -1]).abs().max())


@layouts
def test_logits_are_those_of_dequantized_weights(layout: str, tmp_path: Path) -> None:
    made = quantized.make(LAYOUTS[layout], tmp_path)
    assert largest_error(tmp_path, made) < MAX_ERROR


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("phi3-window", "gptq"),
        ("llama-biases-tied", "awq"),
        ("granite", "ct-w4-32"),
        ("glm4", "ct-int8"),
        ("falcon-h1", "ct-w4-32"),
    ],
)
def test_any_dense_family_takes_them(family: str, layout: str, tmp_path: Path) -> None:
    """Covers fused weights, biases, and outputs that are scaled or permuted."""
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"mamba_d_ssm": 128, "mamba_n_heads": 4, "num_key_value_heads": 4} if family == "falcon-h1" else {}
    made = quantized.make(LAYOUTS[layout], tmp_path, family, **{**sizes, **more}, head_dim=32)
    assert largest_error(tmp_path, made) < MAX_ERROR


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("mixtral", "awq"),
        ("qwen3-moe-tied", "fp8-blocks"),
        ("qwen2-moe", "ct-w4-32"),
        ("deepseek-v3", "fp8-blocks"),
        ("qwen3-moe-some-layers", "gptq-act-order"),
        ("llama4", "ct-w4-32"),
    ],
)
def test_experts_are_widened_as_they_are_loaded(family: str, layout: str, tmp_path: Path) -> None:
    sizes = {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "hidden_size": 128}
    latent = {"q_lora_rank": 32, "kv_lora_rank": 32, "num_key_value_heads": 4, "head_dim": 8}
    more = latent if family == "deepseek-v3" else {}
    ignored = ["re:.*mlp.gate$", "re:.*shared_expert_gate$", "re:.*router$", "lm_head"]
    chosen = LAYOUTS[layout]
    if "ignore" in chosen.config:
        chosen = quantized.Layout({**chosen.config, "ignore": ignored}, chosen.quantize)
    made = quantized.make(chosen, tmp_path, family, **sizes, **more)
    assert largest_error(tmp_path, made) < MAX_ERROR


def test_projections_that_are_left_out_stay_floats(tmp_path: Path) -> None:
    layout = LAYOUTS["ct-w4-32"]
    left_out = [f"model.layers.0.self_attn.{name}_proj" for name in ("q", "k", "v")]
    some = quantized.Layout({**layout.config, "ignore": left_out}, layout.quantize)
    assert largest_error(tmp_path, quantized.make(some, tmp_path)) < MAX_ERROR


def test_single_row_chain_supports_4_bits_and_8_bits_per_row(tmp_path: Path) -> None:
    """The chain of fused kernels reads these in any layout (models/single_row.py)."""
    config = json.loads((quantized.make(LAYOUTS["gptq"], tmp_path).folder / "config.json").read_text())
    read = {name: read_model_config({**config, SECTION: layout.config}) for name, layout in LAYOUTS.items()}
    meeting = {
        name for name, one in read.items() if one.quantization is not None and one.quantization.supports_single_row
    }
    by_row = {"fp8-static", "fp8-tensor", "ct-fp8-channel", "ct-fp8-static", "ct-int8"}
    four_bits = {name for name, one in LAYOUTS.items() if one.config.get("bits", one.config.get("w_bit")) == 4}
    assert meeting == by_row | four_bits | {name for name in LAYOUTS if name.startswith("ct-w4")}


def test_parts_of_one_product_are_quantized_alike(tmp_path: Path) -> None:
    layout = LAYOUTS["ct-w4-32"]
    quantized.make(quantized.Layout({**layout.config, "ignore": ["re:.*k_proj"]}, layout.quantize), tmp_path)
    with pytest.raises(
        InvalidArgument, match=r"layers\.0\.self_attn\.q_proj and .*are computed as one product.*differently"
    ):
        Rig(tmp_path)


def test_parts_whose_columns_are_ordered_otherwise_are_still_right(tmp_path: Path) -> None:
    made = quantized.make(LAYOUTS["gptq-act-order"], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.layers.0.self_attn.k_proj"
    order = torch.arange(128)
    shuffled, back = tensors[f"{name}.g_idx"], (order // 32).int()
    tensors[f"{name}.g_idx"] = back
    save_file(tensors, tmp_path / WEIGHTS)
    module = made.model.get_submodule(name)
    table = {"qweight", "qzeros", "scales"}
    one = {part: tensors[f"{name}.{part}"] for part in table} | {"g_idx": back}
    from quire.services.worker.layers.quantization.gptq import Gptq

    assert not torch.equal(shuffled, back)
    module.weight.data.copy_(Gptq(4, 32, True, True, False, ()).unpack(one, 64, 128).dequantized())
    assert largest_error(tmp_path, made) < MAX_ERROR


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "exl3"}, r"quantization_config.quant_method is 'exl3': supported: awq, bitsandbytes"),
        ({**GPTQ, "bits": 3}, r"quantization_config.bits is 3: supported: 4, 8"),
        ({**GPTQ, "group_size": 0}, r"quantization_config.group_size is 0"),
        ({**GPTQ, "dynamic": {"-:.*": {}}}, r"quantization_config.dynamic is"),
        ({"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemv"}, r"is 'gemv': supported: gemm"),
        (
            {"quant_method": "fp8", "weight_block_size": [64, 64]},
            r"weight_block_size is \[64, 64\]: supported: \[128, 128\]",
        ),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"quantization_config.fmt is 'e5m2'"),
        ({**NF4_CONFIG, "bnb_4bit_quant_type": "int4"}, r"bnb_4bit_quant_type is 'int4': supported: nf4, fp4"),
        (
            compressed(W4, weights("int", 2, "channel")),
            r"quantization_config.config_groups.group_0.weights.num_bits is 2: supported: 4, 8",
        ),
        (compressed("marlin-24", weights("int", 4, "channel")), r"quantization_config.format is 'marlin-24'"),
        (
            compressed("int-quantized", weights("int", 8, "channel"), {**quantized.PER_TOKEN, "symmetric": False}),
            r"input_activations.symmetric is False: supported: True",
        ),
        (compressed(W4, "w4"), r"config_groups.group_0.weights is 'w4': an object is needed"),
    ],
)
def test_unknown_values_are_rejected_by_field_and_value(config: dict[str, Any], named: str, tmp_path: Path) -> None:
    values = json.loads(quantized_config(tmp_path))
    with pytest.raises(InvalidArgument, match=named):
        read_model_config(values | {"quantization_config": config})


def quantized_config(folder: Path) -> str:
    quantized.make(LAYOUTS["gptq"], folder)
    return (folder / "config.json").read_text()


def test_configs_are_checked_without_torch(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(quantized_config(tmp_path))
    code = (
        "import json, sys; from quire.services.worker.models.registry import read_model_config as read\n"
        f"read(json.load(open({str(tmp_path / 'config.json')!r}))); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_tensor_of_another_shape_or_kind_is_named(tmp_path: Path) -> None:
    quantized.make(LAYOUTS["gptq"], tmp_path)
    tensors = load_file(tmp_path / WEIGHTS)
    name = "model.layers.1.mlp.up_proj"
    whole = tensors[f"{name}.qzeros"]
    save_file(tensors | {f"{name}.qzeros": whole[:, :31].contiguous()}, tmp_path / WEIGHTS)
    with pytest.raises(InvalidArgument, match=r"up_proj\.qzeros has shape \[4, 31\], config\.json implies \[4, 32\]"):
        Rig(tmp_path)
    save_file(tensors | {f"{name}.qzeros": whole.float()}, tmp_path / WEIGHTS)
    with pytest.raises(
        InvalidArgument, match=r"up_proj\.qzeros holds torch\.float32, config\.json implies torch\.int32"
    ):
        Rig(tmp_path)


def test_groups_that_do_not_fit_name_the_projection(tmp_path: Path) -> None:
    quantized.make(LAYOUTS["gptq"], tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {**GPTQ, "group_size": 48}}))
    with pytest.raises(InvalidArgument, match=r"q_proj is 128 x 128, but GPTQ has 8 codes in a word and groups of 48"):
        Rig(tmp_path)


def test_a_quantized_checkpoint_needs_no_setting(tmp_path: Path) -> None:
    quantized.make(LAYOUTS["gptq"], tmp_path)
    with pytest.raises(InvalidArgument, match=r"quantization: fp8 is for checkpoints of floats; .*\(gptq\)"):
        Rig(tmp_path, quantization="fp8")


@pytest.mark.parametrize("layout", ["fp8-blocks", "ct-w4-act-order", "awq", "nf4"])
def test_dummy_weights_of_a_quantized_shape(layout: str, tmp_path: Path) -> None:
    quantized.make(LAYOUTS[layout], tmp_path)
    (tmp_path / WEIGHTS).unlink()
    rig = Rig(tmp_path, load_format="dummy")
    rig.step([New(0, PROMPT)], {0: len(PROMPT)})
    assert len(rig.tokens(0)) == len(PROMPT) + 1
