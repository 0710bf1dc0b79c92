"""Reads an adapter in PEFT's format: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al. 2021): a linear layer computes W x + s B A x, where s is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(Kalajdzievski 2023). DoRA (Liu et al. 2024): (m / |W + s B A|) (W x + s B A x), row by row. Embeddings use other names
for A and B: a token's id selects a row of A^T. Stacked experts: expert_stacks.py. Weights that were trained whole
(modules_to_save): vocabulary_adapters.py.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from quire.services.worker.lora.base_copies import BaseCopy
from quire.services.worker.lora.peft import peft_scales
from quire.services.worker.lora.peft.peft_scales import Scales, refusal
from quire.shared.errors import InvalidArgument

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
EMBEDDING_A, EMBEDDING_B = ".lora_embedding_A", ".lora_embedding_B"
BASE = ".base_layer.weight"  # copy of the model's weight, which PEFT saves with adapters of embeddings and output heads
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # transformers' names of stacked expert parameters
WITH_BASE = ("embed_tokens", "lm_head")
STACKED = re.compile(r"(.*\.experts)(\.base_layer)?")
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")  # DoRA's
MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
MAX_SAVED_NAMES = 1_000
ADDED_BY_PEFT = ("classifier", "score")  # to modules_to_save of each classification adapter; one of them exists
MAX_WEIGHT_BYTES = 1 << 30  # per adapter, or the size of its model if that is larger

# Fields of adapter_config.json that change the computation, and their supported values.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
}

# Initialisations that keep the model's own weights. Others (pissa, olora, loftq, corda, lora_ga) train the adapter on
# changed weights, so that it is wrong for the unchanged ones.
INIT = "init_lora_weights"
KEEP_BASE: tuple[object, ...] = (True, False, None, "gaussian", "orthogonal", "eva")


class DamagedAdapter(InvalidArgument):
    """Raised for an incomplete safetensors file: truncated, or overwritten since it was configured."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """Low-rank addition to one projection in float32, (x @ down.T) @ up.T, or a whole weight as one."""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank], times s
    magnitude: Tensor | None = None  # [out_features] DoRA's m
    replaces: bool = False  # replaces the projection's output


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Stacked adapters of one of the two expert parameters of the module `name`."""

    name: str
    a: Tensor  # in PEFT's layout, as is `b`
    b: Tensor
    scales: Mapping[str, tuple[int, float]]  # rank and s, by parameter
    version: str  # PEFT version that wrote the file


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """An adapter in host memory, checked except for names and sizes of the model's layers."""

    name: str
    folder: Path
    modules: Mapping[str, LowRank]  # by the projection's name in the model's checkpoint
    stacks: Sequence[ExpertStack] = ()  # one or two per layer
    bases: Mapping[str, BaseCopy] = field(
        default_factory=dict
    )  # fingerprints of weights that the model must have, by layer
    saved: Mapping[str, Tensor] = field(default_factory=dict)  # replaced weights as stored in the file, by layer
    embeddings: frozenset[str] = frozenset()  # modules that are embeddings

    @property
    def rank(self) -> int:
        """Largest rank of its modules, at least 1."""
        ranks = [pair.down.size(0) for pair in self.modules.values()]
        return max([*ranks, *(rank for stack in self.stacks for rank, _ in stack.scales.values()), 1])

    def digest(self) -> bytes:
        """Returns the SHA-256 of the adapter's content: every module's name, rank and numbers, independently of the
        folder and the order in the file."""
        sha = hashlib.sha256()
        for stack in self.stacks:
            sha.update(json.dumps([stack.name, stack.version, sorted(stack.scales.items()), *stack.a.shape]).encode())
            for part in (stack.a, stack.b):
                sha.update(part.float().contiguous().numpy().data)
        for name, pair in sorted(self.modules.items()):
            sha.update(json.dumps([name, *pair.down.shape, *pair.up.shape]).encode())
            for part in (pair.down, pair.up, *([] if pair.magnitude is None else [pair.magnitude])):
                sha.update(part.contiguous().numpy().data)
        for name, weight in sorted(self.saved.items()):
            sha.update(json.dumps([name, *weight.shape, str(weight.dtype), "whole"]).encode())
            sha.update(weight.contiguous().view(torch.uint8).numpy().data)
        return sha.digest()


def max_weight_bytes(model: Path, least: int = MAX_WEIGHT_BYTES) -> int:
    """Returns the maximum file size of an adapter for this model, a folder or a file: its size, at least `least`."""
    files = model.iterdir() if model.is_dir() else [model]
    return max(least, sum(file.stat().st_size for file in files if file.is_file()))


def read(name: str, folder: Path, max_rank: int = MAX_RANK, most_bytes: int = MAX_WEIGHT_BYTES) -> PeftFolder:
    """Reads and checks an adapter into host memory; does not open files that are not regular or too large
    (`most_bytes`). Raises InvalidArgument that names adapter, field and value, DamagedAdapter for an incomplete
    file."""
    config = _config(name, folder)
    scales = peft_scales.read(name, config, max_rank)
    _check_file(name, folder / WEIGHTS, most_bytes)
    tensors = _Tensors(name, folder / WEIGHTS, scales)
    dora, version = bool(config.get("use_dora")), str(config.get("peft_version") or "")
    stacks = tensors.take_stacks(version)
    embeddings = tensors.take_embeddings(dora=dora)
    modules = {**embeddings, **tensors.take_linears(dora=dora)}
    bases = tensors.take_bases(modules)
    saved = tensors.take_saved(_modules_to_save(name, config))
    tensors.check_empty()
    duplicates = sorted(saved.keys() & modules.keys())
    if duplicates:
        raise refusal(name, f"modules_to_save: {duplicates[0]} is in the file whole, and of low rank")
    if not modules and not stacks and not saved:
        raise refusal(name, f"{folder / WEIGHTS} holds no {A.removeprefix('.')}")
    return PeftFolder(name, folder, modules, stacks, bases, saved, frozenset(embeddings))


def _check_file(name: str, path: Path, max_bytes: int) -> None:
    """Raises InvalidArgument for irregular or too large files; opening a pipe would block until it has a writer."""
    try:
        status = path.stat()
    except OSError as error:
        raise refusal(name, f"cannot read {path}: {error.strerror}") from None
    if not stat.S_ISREG(status.st_mode):
        raise refusal(name, f"{path} is not a regular file")
    if status.st_size > max_bytes:
        raise refusal(name, f"{path} has {status.st_size} bytes, at most {max_bytes} can be served")


def _config(name: str, folder: Path) -> dict[str, Any]:
    """Reads adapter_config.json. Raises InvalidArgument for a file that is not such an object, another PEFT type, a
    field that changes the computation in an unsupported way, or an initialisation that changes the model's weights."""
    path = folder / CONFIG
    _check_file(name, path, MAX_CONFIG_BYTES)
    try:
        config = json.loads(path.read_text())
    except OSError as error:
        raise refusal(name, f"cannot read {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise refusal(name, f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise refusal(name, f"{path} is not a JSON object")
    if config.get("peft_type") != "LORA":
        raise refusal(name, f"peft_type is {config.get('peft_type')!r}, only 'LORA' can be served")
    for key, allowed in NEUTRAL.items():
        if config.get(key) not in allowed:
            raise refusal(name, f"{key} is {config[key]!r}, only {allowed[0]!r} can be served")
    if config.get(INIT) not in KEEP_BASE:
        text = "it was trained on changed weights of the model; save_pretrained of PEFT with"
        end = "path_initial_model_for_weight_conversion makes an adapter for the unchanged ones"
        raise refusal(name, f"{INIT} is {repr(config[INIT])[:80]}: {text} {end}")
    return config


def _modules_to_save(name: str, config: Mapping[str, Any]) -> Sequence[str]:
    """Returns the name suffixes in modules_to_save, possibly none. Raises InvalidArgument if it is not a list of
    names."""
    names = config.get("modules_to_save") or []
    if not isinstance(names, list) or len(names) > MAX_SAVED_NAMES or not all(isinstance(n, str) and n for n in names):
        text = f"modules_to_save is {repr(names)[:80]}, a list of at most {MAX_SAVED_NAMES} names is needed"
        raise refusal(name, text)
    return names


class _Tensors:
    """Tensors of an adapter's file that are not consumed yet: each take_...() method removes those of one kind, and
    check_empty() refuses the rest. Raises DamagedAdapter for a file that cannot be read."""

    def __init__(self, name: str, path: Path, scales: Scales) -> None:
        self._name, self._path, self._scales = name, path, scales
        try:
            # Read into memory: truncating a mapped file would terminate the process.
            self._remaining: dict[str, Tensor] = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise DamagedAdapter(f"lora: {name}: cannot read {path}: {error}", field="lora") from None

    def take_stacks(self, version: str) -> list[ExpertStack]:
        """Consumes stacked expert adapters and returns them in PEFT's layout. `version`: PEFT version that wrote the
        file."""
        stacks = []
        for stem, a, b in self._pairs(A, B, lambda stem: STACKED.fullmatch(stem) is not None):
            match = STACKED.fullmatch(stem.removeprefix(PREFIX))
            assert match is not None
            module = match[1]
            scales = {parameter: self._scales.rank_and_scale(f"{module}.{parameter}") for parameter in (GATE_UP, DOWN)}
            stacks.append(ExpertStack(module, a, b, scales, version))
        return stacks

    def take_embeddings(self, *, dora: bool) -> dict[str, LowRank]:
        """Consumes the additions of embeddings, by module. Raises InvalidArgument if they use DoRA."""
        pairs = {stem: self._pair(stem, a, b) for stem, a, b in self._pairs(EMBEDDING_A, EMBEDDING_B)}
        if dora and pairs:
            text = f"use_dora is True, which embeddings do not support: {min(pairs).removeprefix(PREFIX)}"
            raise refusal(self._name, text)
        return {stem.removeprefix(PREFIX): pair for stem, pair in pairs.items()}

    def take_linears(self, *, dora: bool) -> dict[str, LowRank]:
        """Consumes the additions of linear layers, by module; with `dora` also their magnitudes."""
        modules = {}
        for stem, a, b in self._pairs(A, B):
            pair = self._pair(stem, a, b)
            if dora:
                pair = replace(pair, magnitude=self._magnitude(stem, pair.up.size(0)))
            modules[stem.removeprefix(PREFIX)] = pair
        return modules

    def take_bases(self, modules: Mapping[str, LowRank]) -> dict[str, BaseCopy]:
        """Consumes copies of the base weights of embeddings and output heads among `modules`, and returns their
        fingerprints."""
        names = {module: PREFIX + module + BASE for module in modules if module.endswith(WITH_BASE)}
        return {
            module: BaseCopy.from_weight(self._remaining.pop(key))
            for module, key in names.items()
            if key in self._remaining
        }

    def take_saved(self, ends: Sequence[str]) -> dict[str, Tensor]:
        """Consumes whole weights of modules whose names have these suffixes (PEFT saves them under the model's names)
        and returns them by module. Raises InvalidArgument if one is missing or no matrix of floats."""
        saved: dict[str, Tensor] = {}
        for end in ends:
            keys = [key for key in self._remaining if key.endswith(f"{end}.weight")]
            if not keys and end not in ADDED_BY_PEFT and not any(name.endswith(end) for name in saved):
                raise refusal(self._name, f"modules_to_save has {end!r}, {self._path} has no {PREFIX}{end}.weight")
            for key in keys:
                weight, module = self._remaining.pop(key), key.removeprefix(PREFIX).removesuffix(".weight")
                if weight.dim() != 2 or not weight.is_floating_point():
                    text = f"{list(weight.shape)} of {weight.dtype}"
                    raise refusal(self._name, f"modules_to_save: {module} is {text}, a matrix of floats is needed")
                saved[module] = weight
        return saved

    def check_empty(self) -> None:
        """Raises InvalidArgument if a tensor is left that no method has consumed: an unsupported kind."""
        if self._remaining:
            text = "A, B and DoRA's magnitudes of linear layers, A and B of embeddings and experts"
            raise refusal(self._name, f"{self._path} holds {min(self._remaining)}: only {text} can be served")

    def _pairs(
        self, a: str, b: str, wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Consumes and yields module names with their A and B, whose tensors' names end in `a` and `b`. Raises
        InvalidArgument for a missing B and for tensors that are no matrices."""
        for key in sorted(key for key in self._remaining if key.endswith(a) and wanted(key.removesuffix(a))):
            stem = key.removesuffix(a)
            down, up = self._remaining.pop(key), self._remaining.pop(stem + b, None)
            if up is None:
                raise refusal(self._name, f"{self._path} has no {stem + b}")
            if down.dim() != 2 or up.dim() != 2:
                shapes = f"{list(down.shape)} and {list(up.shape)}"
                raise refusal(self._name, f"{stem} has shapes {shapes}, matrices are needed")
            yield stem, down, up

    def _pair(self, stem: str, down: Tensor, up: Tensor) -> LowRank:
        """Returns the addition in float32, scaled by the module's s. Raises InvalidArgument if its rank is not the
        configured one."""
        rank, scale = self._scales.rank_and_scale(stem.removeprefix(PREFIX))
        if down.size(0) != rank or up.size(1) != rank:
            raise refusal(self._name, f"{stem} has shapes {list(down.shape)} and {list(up.shape)}, r is {rank}")
        return LowRank(down.float(), up.float() * scale)

    def _magnitude(self, stem: str, size: int) -> Tensor:
        """Consumes and returns DoRA's magnitudes of a module, float32 [size]. Raises InvalidArgument unless there is
        exactly one vector of this size."""
        magnitudes = [self._remaining.pop(stem + end) for end in MAGNITUDES if stem + end in self._remaining]
        if len(magnitudes) != 1 or magnitudes[0].numel() != size:
            shapes = [list(magnitude.shape) for magnitude in magnitudes]
            text = f"use_dora is True, {stem} has magnitude vectors of shapes {shapes}, one of {size} is needed"
            raise refusal(self._name, text)
        return magnitudes[0].float().flatten()
