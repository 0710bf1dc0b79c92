"""Conversion between a trained tower and files of a LLaVA checkpoint."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tools.training.pictures.recipe import MEAN, STD, TowerShape
from tools.training.pictures.tower import PROJECTOR, TrainedTower

VISION_FILE = "vision.safetensors"


def save_tower(tower: TrainedTower, file: Path) -> None:
    """Writes the weights of tower and projector in bfloat16, with the tower's sizes among the metadata."""
    tensors = {name: t.detach().to("cpu", torch.bfloat16).contiguous() for name, t in tower.tensors().items()}
    part = file.with_suffix(".part")
    save_file(tensors, part, metadata={"format": "pt", "shape": json.dumps(asdict(tower.shape))})
    part.chmod(0o644)
    part.replace(file)


def load_tower(file: Path) -> TrainedTower:
    """Returns the tower of a file written by `save_tower`."""
    with safe_open(file, "pt") as stored:
        shape = TowerShape(**json.loads(stored.metadata()["shape"]))
        tensors: dict[str, Tensor] = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    tower = TrainedTower(shape, tensors[f"{PROJECTOR}.linear_2.bias"].numel())
    tower.load(tensors)
    return tower


def vision_config(shape: TowerShape) -> dict[str, Any]:
    """Returns the `vision_config` of this shape."""
    return {
        "model_type": "siglip_vision_model",
        **asdict(shape),
        "num_channels": 3,
        "hidden_act": "gelu_pytorch_tanh",
        "attention_dropout": 0.0,
        "vision_use_head": False,
    }


def preprocessor_config(shape: TowerShape) -> dict[str, Any]:
    """Returns the preprocessor_config.json: pictures are scaled to one size without their aspect."""
    return {
        "image_processor_type": "SiglipImageProcessor",
        "processor_class": "LlavaProcessor",
        "do_convert_rgb": True,
        "do_resize": True,
        "size": {"height": shape.image_size, "width": shape.image_size},
        "resample": 3,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [MEAN] * 3,
        "image_std": [STD] * 3,
    }
