"""Drafters as folders that a worker loads: config.json and model.safetensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tools.training.drafters.networks import EagleHead, MedusaHeads
from tools.training.export import LAYER_NAMES, config_of, save_weights
from tools.training.network import Network

EAGLE_NAMES = {
    "embed_norm": "enorm.weight",
    "hidden_norm": "hnorm.weight",
    "fc": "fc.weight",
    "final_norm": "norm.weight",
    **{f"layers.0.{ours}": f"layers.0.{theirs}.weight" for ours, theirs in LAYER_NAMES.items()},
}


def save_draft(draft: Network, folder: Path) -> None:
    """A Qwen3 folder, without the tokenizer, which is the model's."""
    _write(folder, config_of(draft.shape))
    save_weights(draft, folder)


def save_eagle(head: EagleHead, folder: Path) -> None:
    """EAGLE's layout, with the norms that vLLM has names for. The head alone: embeddings are the model's."""
    norms = {"add_para_norm": True, "skip_prenorm": False, "skip_output_norm": False}
    _write(folder, config_of(head.shape) | {"architectures": ["EagleQwen3ForCausalLM"]} | norms)
    parameters = dict(head.named_parameters())
    _save({theirs: parameters[ours] for ours, theirs in EAGLE_NAMES.items()}, folder)


def save_medusa(heads: MedusaHeads, folder: Path) -> None:
    """Writes Medusa's heads in its folder layout, without the output embedding, which is the model's."""
    sizes = {"medusa_num_heads": len(heads.biases), "medusa_num_layers": 1, "hidden_size": heads.biases[0].shape[0]}
    _write(folder, {"architectures": ["MedusaModel"], "model_type": "medusa", **sizes, "dtype": "bfloat16"})
    weights = {f"{n}.0.linear.weight": weight for n, weight in enumerate(heads.weights)}
    _save(weights | {f"{n}.0.linear.bias": bias for n, bias in enumerate(heads.biases)}, folder)


def _write(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def _save(tensors: dict[str, Tensor], folder: Path) -> None:
    """Writes the tensors in bfloat16 as model.safetensors, readable by all users."""
    stored = {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}
    path = folder / "model.safetensors"
    save_file(stored, path, metadata={"format": "pt"})
    path.chmod(0o644)  # save_file makes it readable by its owner alone; images run it as another user
