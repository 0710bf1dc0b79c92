"""Rewrites a Hugging Face checkpoint file by file with other tensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.shared.errors import FailedPrecondition, InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

INDEX, WHOLE = "model.safetensors.index.json", "model.safetensors"
CONFIG = "config.json"
TEXT_CONFIG, TIE = "text_config", "tie_word_embeddings"
TEXT_PREFIX = "language_model."  # of the text part's tensors in multimodal models of transformers 4
TRANSPOSED = "GPT2LMHeadModel"  # weights are stored as [in_features, out_features]


def read_config(folder: Path) -> dict[str, Any]:
    """Reads config.json. Raises InvalidArgument for a folder that is not a floating-point checkpoint."""
    path = folder / CONFIG
    if not path.is_file():
        raise InvalidArgument(f"folder: {path} does not exist; give a Hugging Face folder", field="folder")
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise InvalidArgument(f"folder: {path} is not JSON: {error}", field="folder") from None
    if not isinstance(config, dict):
        raise InvalidArgument(f"folder: {path} is not a JSON object", field="folder")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method")
        raise InvalidArgument(
            f"folder: {folder} is already quantized ({method}); give a checkpoint in 16 or 32 bits", field="folder"
        )
    return config


def is_tied(config: Mapping[str, Any]) -> bool | None:
    """Returns whether the output head is the table of embeddings; None if the configuration does not say."""
    inner = config.get(TEXT_CONFIG) or {}
    found = [part[TIE] for part in (config, inner) if part.get(TIE) is not None]
    return any(found) if found else None


def untie(config: dict[str, Any]) -> None:
    """Changes the configuration to that of a model whose output head is a tensor of its own."""
    config[TIE] = False
    if isinstance(config.get(TEXT_CONFIG), dict):
        config[TEXT_CONFIG] = {**config[TEXT_CONFIG], TIE: False}


def check_unused(out: Path) -> None:
    """Raises FailedPrecondition if the output folder is not empty."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise FailedPrecondition(f"out: {out} exists and is not empty; give a new folder", field="out")


def files(folder: Path) -> list[Path]:
    """Returns the safetensors files of the index, else of the folder; raises InvalidArgument if there are none."""
    index = folder / INDEX
    if index.is_file():
        return [folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise InvalidArgument(f"folder: {folder} contains no *.safetensors", field="folder")
    return found


def shapes(paths: list[Path]) -> dict[str, list[int]]:
    """Returns the shapes of all tensors, by name."""
    from safetensors import safe_open

    found: dict[str, list[int]] = {}
    for path in paths:
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118 - not a dict
    return found


class CheckpointWriter:
    """Writes the new checkpoint; config.json is written last, so that an incomplete folder is not a model."""

    def __init__(self, folder: Path, out: Path) -> None:
        self._folder, self._out = folder, out
        self._places: dict[str, str] = {}
        self._num_bytes = 0

    @classmethod
    @contextmanager
    def of(cls, folder: Path, out: Path, config: dict[str, Any]) -> Iterator[CheckpointWriter]:
        """Opens a writer; add files to it. On exit, `config` in its current state and the other files of the folder
        are written."""
        written = cls(folder, out)
        out.mkdir(parents=True, exist_ok=True)
        yield written
        written._finish(config)

    def add(self, name: str, tensors: dict[str, Tensor]) -> None:
        """Writes the tensors as one safetensors file and records them for the index; does nothing without tensors."""
        from safetensors.torch import save_file

        if not tensors:
            return
        save_file(tensors, self._out / name, metadata={"format": "pt"})
        self._places.update(dict.fromkeys(tensors, name))
        self._num_bytes += sum(tensor.nbytes for tensor in tensors.values())

    def _finish(self, config: dict[str, Any]) -> None:
        """Writes the index, unless all tensors are in one file, and the configuration, and copies the other files of
        the folder."""
        if set(self._places.values()) != {WHOLE}:
            index = {"metadata": {"total_size": self._num_bytes}, "weight_map": self._places}
            (self._out / INDEX).write_text(json.dumps(index))
        for other in self._folder.iterdir():
            is_copied = other.is_file() and other.suffix not in (".safetensors", ".bin") and other.name != INDEX
            if is_copied and other.name != CONFIG:
                shutil.copy(other, self._out / other.name)
        (self._out / CONFIG).write_text(json.dumps(config, indent=2))
