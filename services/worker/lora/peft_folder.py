"""An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al. 2021): a linear layer gives W x + s B A x, where s is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(Kalajdzievski 2023). DoRA (Liu et al. 2024): (m / |W + s B A|) (W x + s B A x), row by row.
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

from services.worker.lora import peft_scales
from services.worker.lora.peft_scales import Scales, refusal

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")  # DoRA's
MOST_RANK = 256
MOST_CONFIG_BYTES = 1 << 20
MOST_BYTES = 1 << 30  # of weights, or as many as its model has, if that is more

# Fields of adapter_config.json that change what is computed, and what they may say.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "modules_to_save": (None, []),
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
    magnitude: Tensor | None = None  # [out_features] DoRA's m


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
            for part in (pair.down, pair.up, *([] if pair.magnitude is None else [pair.magnitude])):
                sha.update(part.contiguous().numpy().data)
        return sha.digest()


def most_bytes(model: Path) -> int:
    """What the weights of an adapter for this model, a folder or a file, may take on disk."""
    files = model.iterdir() if model.is_dir() else [model]
    return max(MOST_BYTES, sum(file.stat().st_size for file in files if file.is_file()))


def read(name: str, folder: Path, max_rank: int = MOST_RANK, most_bytes: int = MOST_BYTES) -> PeftFolder:
    """Raises InvalidArgument that names adapter, field and value. What is no file or is too large is not opened."""
    config = _config(name, folder)
    scales = peft_scales.read(name, config, max_rank)
    _check_file(name, folder / WEIGHTS, most_bytes)
    return PeftFolder(name, folder, _modules(name, folder / WEIGHTS, scales, dora=bool(config.get("use_dora"))))


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


def _modules(name: str, path: Path, scales: Scales, *, dora: bool) -> dict[str, LowRank]:
    try:
        tensors = load(path.read_bytes())  # mapped, a file that is cut short meanwhile would end the process
    except (OSError, SafetensorError) as error:
        raise refusal(name, f"cannot read {path}: {error}") from None
    modules = {}
    for key in sorted(key for key in tensors if key.endswith(A)):
        stem = key.removesuffix(A)
        down, up = tensors.pop(key), tensors.pop(stem + B, None)
        if up is None:
            raise refusal(name, f"{path} has no {stem + B}")
        module = stem.removeprefix(PREFIX)
        rank, scale = scales.of(module)
        if down.dim() != 2 or up.dim() != 2 or down.size(0) != rank or up.size(1) != rank:
            raise refusal(name, f"{stem} has shapes {list(down.shape)} and {list(up.shape)}, r is {rank}")
        magnitude = _magnitude(name, stem, tensors, up.size(0)) if dora else None
        modules[module] = LowRank(down.float(), up.float() * scale, magnitude)
    if tensors:
        raise refusal(
            name, f"{path} holds {min(tensors)}: only A, B and DoRA's magnitudes of linear layers can be served"
        )
    if not modules:
        raise refusal(name, f"{path} holds no {A.removeprefix('.')}")
    return modules


def _magnitude(name: str, stem: str, tensors: dict[str, Tensor], size: int) -> Tensor:
    """Taken out of `tensors`."""
    given = [tensors.pop(stem + end) for end in MAGNITUDES if stem + end in tensors]
    if len(given) != 1 or given[0].numel() != size:
        shapes = [list(one.shape) for one in given]
        raise refusal(
            name, f"use_dora is True, {stem} has magnitude vectors of shapes {shapes}, one of {size} is needed"
        )
    return given[0].float().flatten()
