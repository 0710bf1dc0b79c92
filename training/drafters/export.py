"""Drafters as folders that a worker loads: config.json and model.safetensors."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from training.drafters.networks import EagleHead, MedusaHeads
from training.export import LAYER_NAMES, config_of, save_weights
from training.network import Network

EAGLE_NAMES = {
    "embed_norm": "model.embed_norm.weight",
    "hidden_norm": "model.hidden_norm.weight",
    "fc": "model.fc.weight",
    "final_norm": "model.norm.weight",
    **{f"layers.0.{ours}": f"model.layers.0.{theirs}.weight" for ours, theirs in LAYER_NAMES.items()},
}


def save_draft(draft: Network, folder: Path) -> None:
    """A Qwen3 folder, without the tokenizer, which is the model's."""
    _write(folder, config_of(draft.shape))
    save_weights(draft, folder)


def save_eagle(head: EagleHead, folder: Path) -> None:
    """The head alone: embeddings are the model's."""
    _write(folder, {"architectures": ["QuireEagleHead"], "model_type": "quire_eagle", **_sizes(head)})
    parameters = dict(head.named_parameters())
    _save({theirs: parameters[ours] for ours, theirs in EAGLE_NAMES.items()}, folder)


def save_medusa(heads: MedusaHeads, folder: Path) -> None:
    """The heads alone: the output embedding is the model's."""
    hidden_size = heads.biases[0].shape[0]
    sizes = {"hidden_size": hidden_size, "num_heads": len(heads.biases), "dtype": "bfloat16"}
    _write(folder, {"architectures": ["QuireMedusaHeads"], "model_type": "quire_medusa", **sizes})
    weights = {f"heads.{n}.weight": weight for n, weight in enumerate(heads.weights)}
    _save(weights | {f"heads.{n}.bias": bias for n, bias in enumerate(heads.biases)}, folder)


def _sizes(head: EagleHead) -> dict[str, Any]:
    return asdict(head.shape) | {"qk_norm": True, "dtype": "bfloat16"}


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    path = folder / "model.safetensors"
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it readable by its owner alone; images run it as another user
