"""An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al. 2021): a linear layer gives W x + s B A x, where s is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(Kalajdzievski 2023).
"""

from __future__ import annotations

import hashlib
import json
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from shared.errors import InvalidArgument

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
MOST_RANK = 256
MOST_ALPHA = 1_000_000
MOST_CONFIG_BYTES = 1 << 20
MOST_BYTES = 1 << 30  # of weights, or as many as its model has, if that is more

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

    @property
    def rank(self) -> int:
        """The largest of a module."""
        return max(pair.down.size(0) for pair in self.modules.values())

    def digest(self) -> bytes:
        """SHA-256 of what it computes: every module's name, rank and numbers."""
        sha = hashlib.sha256()
        for name, pair in sorted(self.modules.items()):
            sha.update(json.dumps([name, *pair.down.shape, *pair.up.shape]).encode())
            for part in (pair.down, pair.up):
                sha.update(part.contiguous().numpy().data)
        return sha.digest()


def most_bytes(model: Path) -> int:
    """What the weights of an adapter for this model, a folder or a file, may take on disk."""
    files = model.iterdir() if model.is_dir() else [model]
    return max(MOST_BYTES, sum(file.stat().st_size for file in files if file.is_file()))


def read(name: str, folder: Path, max_rank: int = MOST_RANK, most_bytes: int = MOST_BYTES) -> PeftFolder:
    """Raises InvalidArgument that names adapter, field and value. What is no file or is too large is not opened."""
    config = _config(name, folder)
    rank, scale = _scale(name, config, max_rank)
    _check_file(name, folder / WEIGHTS, most_bytes)
    return PeftFolder(name, folder, _modules(name, folder / WEIGHTS, rank, scale))


def _check_file(name: str, path: Path, most: int) -> None:
    """Whoever opens a pipe waits for somebody to write into it."""
    try:
        found = path.stat()
    except OSError as error:
        raise refusal(name, f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(found.st_mode):
        raise refusal(name, f"{path} is no regular file")
    if found.st_size > most:
        raise refusal(name, f"{path} has {found.st_size} bytes, at most {most} can be served")


def _config(name: str, folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    _check_file(name, path, MOST_CONFIG_BYTES)
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise refusal(name, f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise refusal(name, f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise refusal(name, f"{path} is no JSON object")
    if config.get("peft_type") != "LORA":
        raise refusal(name, f"peft_type is {config.get('peft_type')!r}, only 'LORA' can be served")
    for field, allowed in NEUTRAL.items():
        if config.get(field) not in allowed:
            raise refusal(name, f"{field} is {config[field]!r}, only {allowed[0]!r} can be served")
    return config


def _scale(name: str, config: Mapping[str, Any], max_rank: int) -> tuple[int, float]:
    """Rank and s."""
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or isinstance(rank, bool) or not 1 <= rank <= max_rank:
        raise refusal(name, f"r is {rank!r}, a whole number from 1 to {max_rank} is needed")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not abs(alpha) <= MOST_ALPHA:
        raise refusal(name, f"lora_alpha is {repr(alpha)[:40]}, a number of at most {MOST_ALPHA:,} is needed")
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def _modules(name: str, path: Path, rank: int, scale: float) -> dict[str, LowRank]:
    try:
        tensors = load(path.read_bytes())  # mapped, a file that is cut short meanwhile would end the process
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
