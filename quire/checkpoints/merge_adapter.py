"""Merges a LoRA adapter into a Hugging Face checkpoint: the result is a model of its own, as fast as its base."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quire.checkpoints import folder as checkpoint_folder
from quire.checkpoints.folder import TRANSPOSED, CheckpointWriter, is_tied, untie


@dataclass
class MergeReport:
    """Summary of a merge."""

    out: Path
    num_changed: int  # changed weight tensors
    num_bytes: int = 0
    unties: bool = False  # the output head no longer shares the embeddings


def merge(folder: Path, adapter: Path, out: Path) -> MergeReport:
    """Merges the adapter. One file of weights is in memory at a time, and the adapter. Sums are computed in float32 and
    rounded once.

    Raises InvalidArgument for a quantized checkpoint or an adapter of another model, FailedPrecondition if `out` is
    in use.
    """
    config = checkpoint_folder.read_config(folder)
    checkpoint_folder.check_unused(out)
    files = checkpoint_folder.files(folder)
    peft_folder = importlib.import_module("quire.services.worker.lora.peft.peft_folder")
    read = peft_folder.read(adapter.name, adapter, most_bytes=peft_folder.max_weight_bytes(folder))
    merging = importlib.import_module("quire.services.worker.lora.merging").AdapterMerge(
        read,
        checkpoint_folder.shapes(files),
        tied=is_tied(config),
        transposed=TRANSPOSED in config.get("architectures", []),
    )
    if merging.unties:
        untie(config)
    report = MergeReport(out, merging.num_changed, unties=merging.unties)
    with CheckpointWriter.of(folder, out, config) as written:
        for path in files:
            tensors = _merged(path, merging)
            report.num_bytes += sum(tensor.nbytes for tensor in tensors.values())
            written.add(path.name, tensors)
    return report


def _merged(path: Path, merging: Any) -> dict[str, Any]:
    """Reads one safetensors file and returns its tensors with the adapter merged into them."""
    from safetensors import safe_open

    found: dict[str, Any] = {}
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a dict
            found |= merging.merge_tensor(name, file.get_tensor(name))
    return found
