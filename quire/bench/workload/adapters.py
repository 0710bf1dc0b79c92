"""LoRA adapters with random weights for any served model: their cost depends only on their shapes."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from quire import bundled
from quire.bench.workload.shapes import BenchShape
from quire.bench.workload.workloads import Workload
from quire.flags.setting_flags import human_int
from quire.shared.errors import InvalidArgument
from quire.shared.models.model_identity import read_config

ALPHA = 16
SPREAD = 0.01  # standard deviation of weights: changes texts, keeps numbers small


def configure(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("LoRA adapters with random weights, of q, k, v and o")
    group.add_argument(
        "--lora-adapters", type=human_int, default=0, help="number of adapters; requests use them in turn"
    )
    group.add_argument("--lora-rank", type=human_int, default=16, help="rank of each adapter (default: 16)")


def make(shape: BenchShape, scratch: Path, count: int, rank: int) -> dict[str, str]:
    """Writes `count` random LoRA adapters of `rank` in PEFT format for the shape's attention, the same every time;
    returns their folders by name."""
    from safetensors.numpy import save_file

    folder = shape.folder or bundled.FOLDER
    sizes = _sizes(read_config(folder)) if count else {}
    made = {}
    for number in range(count):
        place = scratch / f"{shape.name}-adapters" / f"adapter-{number}"
        place.mkdir(parents=True, exist_ok=True)
        draw = np.random.default_rng(number)
        tensors = {}
        for name, (out_features, in_features) in sizes.items():
            for part, size in (("A", (rank, in_features)), ("B", (out_features, rank))):
                weight = draw.standard_normal(size, dtype=np.float32) * SPREAD
                tensors[f"base_model.model.{name}.lora_{part}.weight"] = weight.astype(np.float16)
        save_file(tensors, place / "adapter_model.safetensors")
        values = {"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
        (place / "adapter_config.json").write_text(json.dumps(values))
        made[place.name] = str(place)
    return made


def in_turn(work: Workload, names: tuple[str, ...]) -> Workload:
    """Assigns adapters to the requests in turn; without names, none."""
    if not names:
        return work
    items = (replace(item, adapter=names[index % len(names)]) for index, item in enumerate(work.items))
    return replace(work, items=tuple(items))


def without(work: Workload) -> Workload:
    return replace(work, items=tuple(replace(item, adapter="") for item in work.items))


def _sizes(config: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Returns (out_features, in_features) of every attention layer's projections, by module name; raises
    InvalidArgument if config.json lacks a size."""
    try:
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads, layers = config["num_key_value_heads"], config["num_hidden_layers"]
    except KeyError as error:
        text = (
            f"lora_adapters: config.json lacks {error.args[0]}, from which the adapters' sizes follow; choose "
            "another model"
        )
        raise InvalidArgument(text, field="lora_adapters") from None
    head_dim = config.get("head_dim") or hidden // heads
    of_layer = {
        "q_proj": (heads * head_dim, hidden),
        "k_proj": (kv_heads * head_dim, hidden),
        "v_proj": (kv_heads * head_dim, hidden),
        "o_proj": (hidden, heads * head_dim),
    }
    return {f"model.layers.{i}.self_attn.{name}": size for i in range(layers) for name, size in of_layer.items()}
