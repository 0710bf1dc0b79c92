"""An adapter as PEFT saves it: adapter_config.json and adapter_model.safetensors.

LoRA (Hu et al. 2021): a linear layer gives W x + s B A x, where s is alpha / rank, or alpha / sqrt(rank) with rsLoRA
(Kalajdzievski 2023). DoRA (Liu et al. 2024): (m / |W + s B A|) (W x + s B A x), row by row.
Embeddings have A and B of their own names: a row of A^T is what a token's id picks. Experts that are one parameter:
expert_stacks.py. Weights that were trained whole (modules_to_save): vocabulary_adapters.py.
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
BASE = ".base_layer.weight"  # a copy of the model's own, which PEFT saves with adapters of embeddings and output heads
GATE_UP, DOWN = "gate_up_proj", "down_proj"  # what transformers calls the parameters that hold all experts
WITH_BASE = ("embed_tokens", "lm_head")
STACKED = re.compile(r"(.*\.experts)(\.base_layer)?")
MAGNITUDES = (".lora_magnitude_vector", ".lora_magnitude_vector.weight")  # DoRA's
MAX_RANK = 256
MAX_CONFIG_BYTES = 1 << 20
MAX_SAVED_NAMES = 1_000
ADDED_BY_PEFT = ("classifier", "score")  # to modules_to_save of each adapter that classifies; one of them is there
MAX_WEIGHT_BYTES = 1 << 30  # of weights, or as many as its model has, if that is more

# Fields of adapter_config.json that change what is computed, and what they may say.
NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "bias": ("none", None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "trainable_token_indices": (None,),
    "use_qalora": (False, None),
}

# Initialisations that leave the model's own weights as they are. The others (pissa, olora, loftq, corda, lora_ga) train
# the pair beside changed weights: on the unchanged ones it computes something else.
INIT = "init_lora_weights"
KEEP_BASE: tuple[object, ...] = (True, False, None, "gaussian", "orthogonal", "eva")


class DamagedAdapter(InvalidArgument):
    """Raised for a file that is no whole safetensors file: cut short, or overwritten since it was named."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one projection: (x @ down.T) @ up.T"""

    down: Tensor  # [rank, in_features]
    up: Tensor  # [out_features, rank], times s
    magnitude: Tensor | None = None  # [out_features] DoRA's m
    replaces: bool = False  # it stands in the projection's place


@dataclass(frozen=True, slots=True)
class ExpertStack:
    """Of one of the two parameters, that of the module `name`."""

    name: str
    a: Tensor  # as PEFT has them
    b: Tensor
    scales: Mapping[str, tuple[int, float]]  # rank and s, by parameter
    version: str  # of the PEFT that wrote it


@dataclass(frozen=True, slots=True)
class PeftFolder:
    """Read and checked, but for the names and sizes of the layers."""

    name: str
    folder: Path
    modules: Mapping[str, LowRank]  # by the projection's name in the checkpoint of its model
    stacks: Sequence[ExpertStack] = ()  # of all experts of a layer
    bases: Mapping[str, BaseCopy] = field(default_factory=dict)  # what the model must have, by layer
    saved: Mapping[str, Tensor] = field(default_factory=dict)  # whole weights, as they lie in the file, by layer
    embeddings: frozenset[str] = frozenset()  # of modules, those whose pair makes the columns of a table's rows

    @property
    def rank(self) -> int:
        """The largest of a module that is of low rank."""
        ranks = [pair.down.size(0) for pair in self.modules.values()]
        return max([*ranks, *(rank for stack in self.stacks for rank, _ in stack.scales.values()), 1])

    def digest(self) -> bytes:
        """SHA-256 of what it computes: every module's name, rank and numbers."""
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


def max_weight_bytes(model: Path) -> int:
    """What the weights of an adapter for this model, a folder or a file, may take on disk."""
    files = model.iterdir() if model.is_dir() else [model]
    return max(MAX_WEIGHT_BYTES, sum(file.stat().st_size for file in files if file.is_file()))


def read(name: str, folder: Path, max_rank: int = MAX_RANK, most_bytes: int = MAX_WEIGHT_BYTES) -> PeftFolder:
    """Raises InvalidArgument that names adapter, field and value. What is no file or is too large is not opened."""
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
    twice = sorted(saved.keys() & modules.keys())
    if twice:
        raise refusal(name, f"modules_to_save: {twice[0]} is in the file whole, and of low rank")
    if not modules and not stacks and not saved:
        raise refusal(name, f"{folder / WEIGHTS} holds no {A.removeprefix('.')}")
    return PeftFolder(name, folder, modules, stacks, bases, saved, frozenset(embeddings))


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
    _check_file(name, path, MAX_CONFIG_BYTES)
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
    for key, allowed in NEUTRAL.items():
        if config.get(key) not in allowed:
            raise refusal(name, f"{key} is {config[key]!r}, only {allowed[0]!r} can be served")
    if config.get(INIT) not in KEEP_BASE:
        text = "it was trained beside changed weights of the model; save_pretrained of PEFT with"
        end = "path_initial_model_for_weight_conversion makes an adapter for the unchanged ones"
        raise refusal(name, f"{INIT} is {repr(config[INIT])[:80]}: {text} {end}")
    return config


def _modules_to_save(name: str, config: Mapping[str, Any]) -> Sequence[str]:
    """Ends of names."""
    given = config.get("modules_to_save") or []
    if not isinstance(given, list) or len(given) > MAX_SAVED_NAMES or not all(isinstance(n, str) and n for n in given):
        text = f"modules_to_save is {repr(given)[:80]}, a list of at most {MAX_SAVED_NAMES} names is needed"
        raise refusal(name, text)
    return given


class _Tensors:
    """Of an adapter's file, those that are not yet taken."""

    def __init__(self, name: str, path: Path, scales: Scales) -> None:
        self._name, self._path, self._scales = name, path, scales
        try:
            # Mapped, a file that is cut short meanwhile would end the process.
            self._remaining: dict[str, Tensor] = load(path.read_bytes())
        except (OSError, SafetensorError) as error:
            raise DamagedAdapter(f"lora: {name}: cannot read {path}: {error}", field="lora") from None

    def take_stacks(self, version: str) -> list[ExpertStack]:
        """`version`: of the PEFT that wrote them."""
        stacks = []
        for stem, a, b in self._pairs(A, B, lambda stem: STACKED.fullmatch(stem) is not None):
            found = STACKED.fullmatch(stem.removeprefix(PREFIX))
            assert found is not None
            module = found[1]
            scales = {parameter: self._scales.rank_and_scale(f"{module}.{parameter}") for parameter in (GATE_UP, DOWN)}
            stacks.append(ExpertStack(module, a, b, scales, version))
        return stacks

    def take_embeddings(self, *, dora: bool) -> dict[str, LowRank]:
        pairs = {stem: self._pair(stem, a, b) for stem, a, b in self._pairs(EMBEDDING_A, EMBEDDING_B)}
        if dora and pairs:
            text = f"use_dora is True, which embeddings cannot have: {min(pairs).removeprefix(PREFIX)}"
            raise refusal(self._name, text)
        return {stem.removeprefix(PREFIX): pair for stem, pair in pairs.items()}

    def take_linears(self, *, dora: bool) -> dict[str, LowRank]:
        modules = {}
        for stem, a, b in self._pairs(A, B):
            pair = self._pair(stem, a, b)
            if dora:
                pair = replace(pair, magnitude=self._magnitude(stem, pair.up.size(0)))
            modules[stem.removeprefix(PREFIX)] = pair
        return modules

    def take_bases(self, modules: Mapping[str, LowRank]) -> dict[str, BaseCopy]:
        names = {module: PREFIX + module + BASE for module in modules if module.endswith(WITH_BASE)}
        return {
            module: BaseCopy.from_weight(self._remaining.pop(key))
            for module, key in names.items()
            if key in self._remaining
        }

    def take_saved(self, ends: Sequence[str]) -> dict[str, Tensor]:
        """Whole weights of modules whose names end so, which PEFT saves under the names that they have in a model."""
        saved: dict[str, Tensor] = {}
        for end in ends:
            found = [key for key in self._remaining if key.endswith(f"{end}.weight")]
            if not found and end not in ADDED_BY_PEFT and not any(name.endswith(end) for name in saved):
                raise refusal(self._name, f"modules_to_save has {end!r}, {self._path} has no {PREFIX}{end}.weight")
            for key in found:
                weight, module = self._remaining.pop(key), key.removeprefix(PREFIX).removesuffix(".weight")
                if weight.dim() != 2 or not weight.is_floating_point():
                    text = f"{list(weight.shape)} of {weight.dtype}"
                    raise refusal(self._name, f"modules_to_save: {module} is {text}, a matrix of floats is needed")
                saved[module] = weight
        return saved

    def check_empty(self) -> None:
        if self._remaining:
            text = "A, B and DoRA's magnitudes of linear layers, A and B of embeddings and experts"
            raise refusal(self._name, f"{self._path} holds {min(self._remaining)}: only {text} can be served")

    def _pairs(
        self, a: str, b: str, wanted: Callable[[str], bool] = lambda _: True
    ) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Names without their end, A and B."""
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
        rank, scale = self._scales.rank_and_scale(stem.removeprefix(PREFIX))
        if down.size(0) != rank or up.size(1) != rank:
            raise refusal(self._name, f"{stem} has shapes {list(down.shape)} and {list(up.shape)}, r is {rank}")
        return LowRank(down.float(), up.float() * scale)

    def _magnitude(self, stem: str, size: int) -> Tensor:
        given = [self._remaining.pop(stem + end) for end in MAGNITUDES if stem + end in self._remaining]
        if len(given) != 1 or given[0].numel() != size:
            shapes = [list(one.shape) for one in given]
            text = f"use_dora is True, {stem} has magnitude vectors of shapes {shapes}, one of {size} is needed"
            raise refusal(self._name, text)
        return given[0].float().flatten()
