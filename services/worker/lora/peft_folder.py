"""An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al. 2021): a linear layer gives W x + s B A x, where s is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(Kalajdzievski 2023).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from shared.errors import InvalidArgument

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
MOST_RANK = 256

# Fields of adapter_config.json that change what is computed, and what they may say.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
    "target_parameters": (None, []),
}


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection: (x @ down.T) @ up.T"""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank], times s


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """Read and checked, but for the names and sizes of the layers."""

    name: str
    folder: Path
    modules: Mapping[str, LowRank]  # by the projection's name in the checkpoint of its model


def read(name: str, folder: Path) -> PeftFolder:
    """Raises InvalidArgument that names adapter, field and value."""
    config = _config(name, folder)
    rank, scale = _scale(name, config)
    return PeftFolder(name, folder, _modules(name, folder / WEIGHTS, rank, scale))


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise refusal(name, f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise refusal(name, f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise refusal(name, f"{path} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise refusal(name, f"peft_type is {config.get('peft_type')!r}, only 'LORA' can be served")
    for field, allowed in NEUTRAL.items():
        if config.get(field) not in allowed:
            raise refusal(name, f"{field} is {config[field]!r}, only {allowed[0]!r} can be served")
    return config


def _scale(name: str, config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and s."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= MOST_RANK:
        raise refusal(name, f"r is {rank!r}, a whole number from 1 to {MOST_RANK} is needed")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool):
        raise refusal(name, f"lora_alpha is {alpha!r}, a number is needed")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _modules(name: str, path: Path, rank: int, scale: float) -> dict[str, LowRank]:
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    except (OSError, SafetensorError) as error:
        raise refusal(name, f"cannot read {path}: {error}") from None
    modules = {}
    for key in [key for key in tensors if key.endswith(A)]:
        stem = key.removesuffix(A)
        down, up = tensors.pop(key), tensors.pop(stem + B, None)
        if up is None:
            raise refusal(name, f"{path} has no {stem + B}")
        if down.dim() != 2 or up.dim() != 2 or down.size(0) != rank or up.size(1) != rank:
            raise refusal(name, f"{stem} has shapes {list(down.shape)} and {list(up.shape)}, r is {rank}")
        modules[stem.removeprefix(PREFIX)] = LowRank(down.float(), up.float() * scale)
    if tensors:
        raise refusal(name, f"{path} holds {min(tensors)}: only A and B of linear layers can be served")
    if not modules:
        raise refusal(name, f"{path} holds no {A.removeprefix('.')}")
    return modules


def refusal(name: str, text: str) -> InvalidArgument:
    return InvalidArgument(f"lora: {name}: {text}", field="lora")
