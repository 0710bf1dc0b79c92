"""Adapters with random weights, as PEFT saves them, and the models that they make when they are merged."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from tests.services.worker.checkpoints import Checkpoint

RANK, ALPHA = 4, 6.0
NO_ADAPTERS = ("lm_head", "embed_out", ".gate", ".router", "router.layer", "shared_expert_gate", "kv_b_proj")

Wanted = Callable[[str], bool]


def projections(made: Checkpoint) -> dict[str, tuple[int, int]]:
    """Out and in features of every linear layer that can have an adapter, by its name in the model."""
    found = {}
    for name, module in made.model.named_modules():
        if name.endswith(NO_ADAPTERS):
            continue
        if isinstance(module, torch.nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif type(module).__name__ == "Conv1D":
            found[name] = (module.weight.size(1), module.weight.size(0))
    return found


def save(
    made: Checkpoint, folder: Path, *, seed: int, wanted: Wanted = lambda _: True, rank: int = RANK, **config: Any
) -> Checkpoint:
    """Writes the adapter, of the projections `wanted`; returns the model with it merged. Patterns in `config` are by
    names that projections end in."""
    folder.mkdir(parents=True)
    merged = copy.deepcopy(made.model)
    r, generator, tensors = rank, torch.Generator().manual_seed(seed), {}
    for name, (out_features, in_features) in projections(made).items():
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
    save_file(tensors, folder / "adapter_model.safetensors")
    values = {"peft_type": "LORA", "r": r, "lora_alpha": ALPHA, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**values, **config}))
    return Checkpoint(folder, merged)


def _of_pattern(pattern: dict[str, Any] | None, name: str, other: Any) -> Any:
    return next((value for end, value in (pattern or {}).items() if name.endswith(end)), other)
