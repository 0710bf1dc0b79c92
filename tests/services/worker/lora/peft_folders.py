"""Adapters with random weights in PEFT's format, and models with these adapters merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.services.worker.checkpoints import Checkpoint

RANK, ALPHA = 4, 6.0
NO_ADAPTERS = ("lm_head", "embed_out", ".gate", ".router", "router.layer", "shared_expert_gate", "kv_b_proj")

Wanted = Callable[[str], bool]


@dataclass
class Draft:
    """An adapter under construction, and the model with it merged."""

    merged: Any
    tensors: dict[str, torch.Tensor]
    generator: torch.Generator
    rank: int
    scale: float

    def matrices(self, out_features: int, in_features: int) -> tuple[torch.Tensor, torch.Tensor]:
        a = torch.randn(self.rank, in_features, generator=self.generator) * in_features**-0.5
        return a, torch.randn(out_features, self.rank, generator=self.generator) * 0.4


More = Callable[[Draft], None]


def embedding(draft: Draft, name: str = "model.embed_tokens") -> None:
    """Adds an adapter of the embeddings, not of a tied output head."""
    module = draft.merged.get_submodule(name)
    vocab_size, size = module.weight.shape
    a = torch.randn(draft.rank, vocab_size, generator=draft.generator)
    b = torch.randn(size, draft.rank, generator=draft.generator) * 0.2
    stem = f"base_model.model.{name}.lora_embedding_"
    draft.tensors |= {f"{stem}A": a, f"{stem}B": b}
    module.weight = torch.nn.Parameter(module.weight.data + draft.scale * (b @ a).t())


def head(draft: Draft) -> None:
    """Adds an adapter of the output head, not of tied embeddings."""
    module = draft.merged.get_submodule("lm_head")
    a, b = draft.matrices(*module.weight.shape)
    draft.tensors |= {"base_model.model.lm_head.lora_A.weight": a, "base_model.model.lm_head.lora_B.weight": b}
    module.weight = torch.nn.Parameter(module.weight.data + draft.scale * b @ a)


def _whole(draft: Draft, name: str) -> None:
    module = draft.merged.get_submodule(name)
    weight = module.weight.data + torch.randn(module.weight.shape, generator=draft.generator) * 0.1
    draft.tensors[f"base_model.model.{name}.weight"] = weight
    module.weight = torch.nn.Parameter(weight)


def whole_embedding(draft: Draft) -> None:
    """Replaces the embeddings (modules_to_save); a tied output head keeps the old weight."""
    _whole(draft, "model.embed_tokens")


def whole_head(draft: Draft) -> None:
    """Replaces the output head."""
    _whole(draft, "lm_head")


def bases(draft: Draft) -> None:
    """Adds copies of the model's own weights, as PEFT saves them; call it before `embedding` and `head`."""
    for name in ("model.embed_tokens", "lm_head"):
        weight = draft.merged.get_submodule(name).weight.data
        draft.tensors[f"base_model.model.{name}.base_layer.weight"] = weight.clone()


def experts(merged: Any) -> list[tuple[str, Any]]:
    """Returns names and modules of layers whose experts are two stacked parameters."""
    return [(name, module) for name, module in merged.named_modules() if hasattr(module, "gate_up_proj")
            and getattr(module.gate_up_proj, "ndim", 0) == 3]  # fmt: skip


def each_expert(draft: Draft) -> None:
    """Adds adapters of single experts by checkpoint names; the second expert's down projection has none."""
    is_mixtral = type(draft.merged).__name__.startswith("Mixtral")
    gate_name, up_name, down_name = ("w1", "w3", "w2") if is_mixtral else ("gate_proj", "up_proj", "down_proj")
    for name, module in experts(draft.merged):
        stem = "base_model.model." + (name.replace(".mlp.", ".block_sparse_moe.") if is_mixtral else name)
        for expert, (gate_up, down) in enumerate(zip(module.gate_up_proj.data, module.down_proj.data, strict=True)):
            gate, up = gate_up.chunk(2)
            for part, weight in {gate_name: gate, up_name: up, down_name: down}.items():
                if expert == 1 and part == down_name:
                    continue
                a, b = draft.matrices(*weight.shape)
                key = f"{stem}.{expert}.{part}.lora_"
                draft.tensors |= {f"{key}A.weight": a, f"{key}B.weight": b}
                weight.add_(draft.scale * b @ a)


def all_experts(draft: Draft, *, outputs_first: bool = False) -> None:
    """Adds adapters of stacked expert parameters (PEFT's target_parameters); `outputs_first`: as before PEFT 0.19."""
    for name, module in experts(draft.merged):
        for end, weights in {".base_layer": module.gate_up_proj.data, "": module.down_proj.data}.items():
            turned = weights.transpose(1, 2) if outputs_first else weights
            pairs = [draft.matrices(*weight.shape) for weight in turned]
            stem = f"base_model.model.{name}{end}.lora_"
            draft.tensors[f"{stem}A.weight"] = torch.cat([a for a, _ in pairs])
            draft.tensors[f"{stem}B.weight"] = torch.stack([b for _, b in pairs], dim=2).flatten(1)
            for weight, (a, b) in zip(turned, pairs, strict=True):
                weight.add_(draft.scale * b @ a)


def projections(made: Checkpoint, without: tuple[str, ...] = NO_ADAPTERS) -> dict[str, tuple[int, int]]:
    """Returns out and in features of every linear layer that can have an adapter, by its name in the model; `without`:
    suffixes of those that can not."""
    found = {}
    for name, module in made.model.named_modules():
        if name.endswith(without):
            continue
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            found[name] = (module.weight.size(1), module.weight.size(0))
    return found


def save(
    made: Checkpoint,
    folder: Path,
    *,
    seed: int,
    wanted: Wanted = lambda _: True,
    rank: int = RANK,
    more: Sequence[More] = (),
    without: tuple[str, ...] = NO_ADAPTERS,
    **config: Any,
) -> Checkpoint:
    """Writes the adapter of the projections `wanted` and of `more`; returns the model with it merged.

    `without`: suffixes of layers that get none. Patterns in `config` are by suffixes of the projections' names.
    """
    folder.mkdir(parents=True)
    merged = copy.deepcopy(made.model)
    r, generator, tensors = rank, torch.Generator().manual_seed(seed), {}
    for name, (out_features, in_features) in projections(made, without).items():
        if not wanted(name):
            continue
        rank = _of_pattern(config.get("rank_pattern"), name, r)
        alpha = _of_pattern(config.get("alpha_pattern"), name, ALPHA)
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        a = torch.randn(rank, in_features, generator=generator) * in_features**-0.5
        b = torch.randn(out_features, rank, generator=generator) * 0.4
        tensors |= {f"base_model.model.{name}.lora_A.weight": a, f"base_model.model.{name}.lora_B.weight": b}
        module = merged.get_submodule(name)
        is_turned = type(module).__name__ == "Conv1D"
        weight = (module.weight.data.t() if is_turned else module.weight.data) + scale * b @ a
        if config.get("use_dora"):
            norm = weight.norm(dim=1)
            magnitude = norm * (0.5 + torch.rand(out_features, generator=generator))
            tensors[f"base_model.model.{name}.lora_magnitude_vector"] = magnitude
            weight *= (magnitude / norm)[:, None]
        module.weight.data = weight.t().contiguous() if is_turned else weight
    draft = Draft(merged, tensors, generator, r, ALPHA / r)
    for add in more:
        add(draft)
    tensors = {name: tensor.contiguous() for name, tensor in draft.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": r, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return Checkpoint(folder, merged)


def _of_pattern(pattern: dict[str, Any] | None, name: str, other: Any) -> Any:
    return next((value for end, value in (pattern or {}).items() if name.endswith(end)), other)
