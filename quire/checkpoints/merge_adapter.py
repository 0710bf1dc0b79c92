"""Writes a checkpoint of Hugging Face again with an adapter in its weights: a model of its own, as fast as its base."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints import folder as checkpoint_folder
from quire.checkpoints.folder import OTHER_WAY_ROUND, CheckpointWriter


@dataclass
class MergeReport:
    """What became of a checkpoint."""

    out: Path
    num_changed: int  # weights
    num_bytes: int = 0
    unties: bool = False  # the output head is the table of embeddings no more


def merge(folder: Path, adapter: Path, out: Path) -> MergeReport:
    """One file of weights is in memory at a time, and the adapter. Sums are of float32, rounded once.

    Raises InvalidArgument for a checkpoint that is quantized, or that the adapter is not for, FailedPrecondition if
    `out` is in use."""
    config = checkpoint_folder.read_config(folder)
    checkpoint_folder.check_unused(out)
    files = checkpoint_folder.files(folder)
    peft_folder = importlib.import_module("quire.services.worker.lora.peft.peft_folder")
    read = peft_folder.read(adapter.name, adapter, most_bytes=peft_folder.max_weight_bytes(folder))
    merging = importlib.import_module("quire.services.worker.lora.merging").AdapterMerge(
        read,
        checkpoint_folder.shapes(files),
        tied=config.get("tie_word_embeddings"),
        transposed=OTHER_WAY_ROUND in config.get("architectures", []),
    )
    if merging.unties:
        config["tie_word_embeddings"] = False
    report = MergeReport(out, merging.num_changed, unties=merging.unties)
    with CheckpointWriter.of(folder, out, config) as written:
        for path in files:
            tensors = _merged(path, merging)
            report.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            written.add(path.name, tensors)
    return report


def _merged(path: Path, merging: Any) -> dict[str, Any]:
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            found |= merging.merge_tensor(name, file.get_tensor(name))
    return found
