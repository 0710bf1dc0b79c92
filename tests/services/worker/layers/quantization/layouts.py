"""Small checkpoints in the published quantization layouts, written from float weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tests.services.worker import checkpoints
from tests.services.worker.checkpoints import Checkpoint

WEIGHTS = "model.safetensors"
SIZES = {
    **{"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 32},
}
Tensors = dict[str, torch.Tensor]
Quantize = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]

# Table stored by bitsandbytes with every 4-bit weight (arXiv 2305.14314, appendix E).
NF4 = torch.tensor(
    [
        *(-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0),
        *(0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0),
    ]
)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Layout:
    """A `quantization_config` and the conversion of a projection [out, in]: its tensors, and their dequantized
    floats."""

    config: dict[str, Any]
    quantize: Quantize


def make(layout: Layout, folder: Path, family: str = "qwen3-tied", **overrides: Any) -> Checkpoint:
    """Writes a checkpoint with the quantized weights; the model of transformers has the dequantized floats."""
    made = checkpoints.make(family, folder, **{**SIZES, **overrides})
    ignored = layout.config.get("ignore", [])
    tensors: Tensors = {}
    exact: Tensors = {}
    for name, tensor in by_expert(load_file(folder / WEIGHTS)).items():
        module = name.removesuffix(".weight")
        exact[name] = tensor
        projection = "_proj" in name or re.search(r"experts\.\d+\.w\d", name)
        if not projection or not name.endswith(".weight") or module in ignored:
            tensors[name] = tensor
            continue
        stored, floats = layout.quantize(tensor.float())
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in stored.items()}
        exact[name] = floats
    save_file(stacked(exact), folder / WEIGHTS)
    model = type(made.model).from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    save_file(tensors, folder / WEIGHTS)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": layout.config}))
    return Checkpoint(folder, model)


def by_expert(tensors: Tensors) -> Tensors:
    """Splits Llama 4's stacked experts into one tensor per projection, as quantized checkpoints do."""
    found: Tensors = {}
    for name, tensor in tensors.items():
        module, _, kind = name.rpartition(".")
        if not module.endswith("feed_forward.experts"):
            found[name] = tensor
            continue
        parts = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for number, expert in enumerate(tensor):
            for part, weight in zip(parts, expert.t().chunk(len(parts)), strict=True):
                found[f"{module}.{number}.{part}.weight"] = weight.contiguous()
    return found


def stacked(tensors: Tensors) -> Tensors:
    """Reverses by_expert(): stacks the tensors of all experts."""
    found: Tensors = {}
    experts: dict[str, dict[str, list[torch.Tensor]]] = {}
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(.*feed_forward\.experts)\.\d+\.(gate|up|down)_proj\.weight", name)
        if part is None:
            found[name] = tensor
        else:
            experts.setdefault(part[1], {}).setdefault(part[2], []).append(tensor.t())
    for module, kinds in experts.items():
        gates, ups, downs = (torch.stack(kinds[kind]) for kind in ("gate", "up", "down"))
        found |= {f"{module}.gate_up_proj": torch.cat((gates, ups), 2), f"{module}.down_proj": downs.contiguous()}
    return found


def words(codes: torch.Tensor, bits: int, dim: int) -> torch.Tensor:
    """Packs codes into 32-bit words along `dim`, the first in the lowest bits."""
    fields = codes.long().movedim(dim, -1)
    fields = torch.nn.functional.pad(fields, (0, -fields.size(-1) % (32 // bits))).unflatten(-1, (-1, 32 // bits))
    shifts = torch.arange(0, 32, bits)
    value = (fields << shifts).sum(-1)
    return (value - (value >> 31 << 32)).int().movedim(-1, dim)


def integers(
    weight: torch.Tensor, bits: int, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantizes to codes [out, in] from 0 to 2**bits - 1 with scales and zeros [out, groups]."""
    groups = weight.unflatten(1, (-1, group))
    top = 2**bits - 1
    if symmetric:
        scales = groups.abs().amax(2) / (2 ** (bits - 1) - 0.5)
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = groups.amin(2).clamp(max=0), groups.amax(2).clamp(min=0)
        scales = (high - low) / top
        zeros = (-low / scales).round().clamp(0, top)
    scales = scales.half().float()
    codes = (groups / scales.unsqueeze(2) + zeros.unsqueeze(2)).round().clamp(0, top)
    return codes.flatten(1), scales, zeros


def floats(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    groups = codes.unflatten(1, (scales.size(1), -1))
    return ((groups - zeros.unsqueeze(2)) * scales.unsqueeze(2)).flatten(1)


def fp8(strategy: str, *, scale: str = "weight_scale", static: str | None = None) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        rows, columns = weight.shape
        if strategy == "block":
            padded = torch.nn.functional.pad(weight, (0, -columns % 128, 0, -rows % 128))
            tiles = padded.view(padded.size(0) // 128, 128, padded.size(1) // 128, 128)
            scales = tiles.abs().amax((1, 3)) / 448
            wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]
        else:
            scales = weight.abs().amax(1, keepdim=True) / 448 if strategy == "channel" else weight.abs().amax() / 448
            wide = scales
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = {"weight": codes, scale: scales}
        return stored | ({static: torch.tensor(0.02)} if static else {}), codes.float() * wide

    return quantize


def int8(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scales = weight.abs().amax(1, keepdim=True) / 127
    codes = (weight / scales).round()
    return {"weight": codes.to(torch.int8), "weight_scale": scales.bfloat16()}, codes * scales.bfloat16().float()


def packed(bits: int, group: int, *, symmetric: bool = True, act_order: bool = False) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = shuffled(weight.size(1)) if act_order else torch.arange(weight.size(1))
        size = group if group > 0 else weight.size(1)
        codes, scales, zeros = integers(weight[:, order], bits, size, symmetric=symmetric)
        back = order.argsort()
        stored = {
            "weight_packed": words(codes[:, back], bits, 1),
            "weight_scale": scales.half(),
            "weight_shape": torch.tensor(weight.shape),
        }
        if not symmetric:
            stored["weight_zero_point"] = words(zeros, bits, 0)
        if act_order:
            stored["weight_g_idx"] = (torch.arange(weight.size(1)) // size)[back].int()
        return stored, floats(codes, scales, zeros)[:, back]

    return quantize


def awq(group: int) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, scales, zeros = integers(weight, 4, group, symmetric=False)

        def interleaved(values: torch.Tensor) -> torch.Tensor:  # [n, out]
            return words(values.unflatten(1, (-1, 8))[..., list(AWQ_ORDER)].flatten(1), 4, 1)

        stored = {"qweight": interleaved(codes.t()), "qzeros": interleaved(zeros.t()), "scales": scales.t().half()}
        return stored, floats(codes, scales, zeros)

    return quantize


def gptq(bits: int, group: int, *, act_order: bool = False, symmetric: bool = False, less_one: bool = True) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        order = shuffled(weight.size(1)) if act_order else torch.arange(weight.size(1))
        size = group if group > 0 else weight.size(1)
        codes, scales, zeros = integers(weight[:, order], bits, size, symmetric=symmetric)
        back = order.argsort()
        stored_zeros = (zeros - int(less_one)).long() & (2**bits - 1)
        stored = {
            "qweight": words(codes[:, back].t(), bits, 0),
            "qzeros": words(stored_zeros.t(), bits, 1),
            "scales": scales.t().half(),
            "g_idx": (torch.arange(weight.size(1)) // size)[back].int(),
        }
        return stored, floats(codes, scales, zeros)[:, back]

    return quantize


def nf4(*, nested: bool) -> Quantize:
    def quantize(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        blocks = weight.reshape(-1, 64)
        absmax = blocks.abs().amax(1)
        stored: Tensors = {"weight.quant_map": NF4.clone()}
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "float32", "shape": list(weight.shape)}
        if nested:
            table, offset = torch.linspace(-1, 1, 256), absmax.mean()
            rest = absmax - offset
            outer = torch.stack([part.abs().amax() for part in rest.split(256)])
            wide = outer.repeat_interleave(256)[: len(rest)]
            places = ((rest / wide).unsqueeze(1) - table).abs().argmin(1)
            absmax = table[places] * wide + offset
            stored |= {"weight.absmax": places.to(torch.uint8), "weight.nested_absmax": outer}
            stored["weight.nested_quant_map"] = table
            state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset.item()}
        else:
            stored["weight.absmax"] = absmax
        codes = ((blocks / absmax.unsqueeze(1)).unsqueeze(2) - NF4).abs().argmin(2)
        pairs = codes.flatten().view(-1, 2)
        stored["weight"] = (pairs[:, 0] << 4 | pairs[:, 1]).to(torch.uint8).unsqueeze(1)
        blob = json.dumps(state).encode()
        stored["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(blob), dtype=torch.uint8)
        return stored, (NF4[codes] * absmax.unsqueeze(1)).view(weight.shape)

    return quantize


def int8_rows(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    largest = weight.abs().amax(1)
    codes = (weight / largest.unsqueeze(1) * 127).round()
    stored = {"weight": codes.to(torch.int8), "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return stored, codes * largest.unsqueeze(1) / 127


def shuffled(count: int) -> torch.Tensor:
    return torch.randperm(count, generator=torch.Generator().manual_seed(count))


def compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        **{"quant_method": "compressed-tensors", "format": form, "quantization_status": "compressed"},
        **{"config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None, **more},
    }


def weights(kind: str, bits: int, strategy: str, *, symmetric: bool = True, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": kind, "strategy": strategy, "symmetric": symmetric, "dynamic": False, **more}


PER_TOKEN = {"num_bits": 8, "strategy": "token", "symmetric": True, "dynamic": True}
PER_TENSOR = {"num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}
FP8_BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
NF4_CONFIG = {"quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": False}
W4 = "pack-quantized"

LAYOUTS: dict[str, Layout] = {
    "fp8-blocks": Layout(FP8_BLOCKS, fp8("block", scale="weight_scale_inv")),
    "fp8-static": Layout({"quant_method": "fp8", "activation_scheme": "static"}, fp8("tensor", static="input_scale")),
    "fp8-tensor": Layout(
        {"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8("tensor", scale="weight_scale_inv")
    ),
    "ct-fp8-channel": Layout(
        compressed("float-quantized", weights("float", 8, "channel"), {**PER_TOKEN, "type": "float"}), fp8("channel")
    ),
    "ct-fp8-static": Layout(
        compressed("float-quantized", weights("float", 8, "tensor"), {**PER_TENSOR, "type": "float"}),
        fp8("tensor", static="input_scale"),
    ),
    "ct-int8": Layout(compressed("int-quantized", weights("int", 8, "channel"), {**PER_TOKEN, "type": "int"}), int8),
    "ct-w4-32": Layout(compressed(W4, weights("int", 4, "group", group_size=32)), packed(4, 32)),
    "ct-w4-128-zeros": Layout(
        compressed(W4, weights("int", 4, "group", group_size=128, symmetric=False)), packed(4, 128, symmetric=False)
    ),
    "ct-w4-channel": Layout(compressed(W4, weights("int", 4, "channel")), packed(4, 0)),
    "ct-w4-act-order": Layout(
        compressed(W4, weights("int", 4, "group", group_size=32, actorder="group")), packed(4, 32, act_order=True)
    ),
    "ct-w8-128": Layout(compressed(W4, weights("int", 8, "group", group_size=128)), packed(8, 128)),
    "awq": Layout({"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"}, awq(64)),
    "gptq": Layout(GPTQ, gptq(4, 32)),
    "gptq-act-order": Layout({**GPTQ, "desc_act": True}, gptq(4, 32, act_order=True)),
    "gptq-8-rows": Layout({**GPTQ, "bits": 8, "group_size": -1, "sym": True}, gptq(8, -1, symmetric=True)),
    "gptq-v2": Layout({**GPTQ, "checkpoint_format": "gptq_v2"}, gptq(4, 32, less_one=False)),
    "nf4": Layout({**NF4_CONFIG, "bnb_4bit_use_double_quant": False}, nf4(nested=False)),
    "nf4-nested": Layout({**NF4_CONFIG, "bnb_4bit_use_double_quant": True}, nf4(nested=True)),
    "bnb-int8": Layout({"quant_method": "bitsandbytes", "load_in_8bit": True, "load_in_4bit": False}, int8_rows),
}
