"""Text part of the bundled model: its tensors by the names of a text model, and a folder that has nothing else."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from quire import bundled
from quire.shared.models.model_identity import read_config

PREFIX = "language_model."  # of the text part's tensors in the bundled model's file
COPIED = ("chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json")


def text_tensors() -> dict[str, Tensor]:
    """Returns the text part's tensors by their names in a Qwen3 model."""
    return named_as_text(load_file(bundled.FOLDER / "model.safetensors"))


def named_as_text(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the text part's tensors of a checkpoint like the bundled one, by their names in a Qwen3 model."""
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items() if name.startswith(PREFIX)}


def write_text_model(folder: Path) -> Path:
    """Writes the text part as a Qwen3 model, which transformers opens as one; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in COPIED:
        shutil.copy(bundled.FOLDER / name, folder)
    (folder / "config.json").write_text(json.dumps(read_config(bundled.FOLDER)))
    save_file(text_tensors(), folder / "model.safetensors", {"format": "pt"})
    return folder
