"""Quantizes the projections of a Hugging Face checkpoint, in the layout of compressed-tensors.

Weights are rounded to the nearest code; nothing is calibrated. Embeddings, norms, the output head, and the towers of
multimodal models stay unchanged.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.checkpoints import folder as checkpoint_folder
from quire.checkpoints.folder import TEXT_PREFIX, TRANSPOSED, CheckpointWriter, is_tied, untie
from quire.shared.errors import InvalidArgument

if TYPE_CHECKING:
    from torch import Tensor

TABLES = (
    "embed_tokens",
    "lm_head",
    "wte",
    "wpe",
    "embed_positions",
)  # two-dimensional weights that are not projections
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
FP8_MAX, INT8_MAX, INT4_MAX = 448.0, 127.0, 7.0
GROUPS = (128, 64, 32)
CLIPS = tuple(
    1 - step / 20 for step in range(8)
)  # fractions of a group's largest weight; the one with the smallest squared error is used

Quantized = tuple[dict[str, "Tensor"], "Tensor"]  # tensors by suffix, and the dequantized values


@dataclass
class QuantizeReport:
    """Summary of a quantization."""

    out: Path
    num_projections: int = 0
    bytes_before: int = 0
    bytes_after: int = 0
    squares: float = 0.0
    squared_errors: float = 0.0
    worst: tuple[float, str] = field(default=(0.0, ""))

    @property
    def error(self) -> float:
        """Relative error of the weights: norm of the difference over the norm of the weights."""
        return float((self.squared_errors / self.squares) ** 0.5) if self.squares else 0.0

    def add(self, name: str, weight: Tensor, floats: Tensor) -> None:
        """Adds a projection's squared error to the totals and keeps the worst relative one."""
        squares, errors = float(weight.square().sum()), float((weight - floats).square().sum())
        self.num_projections += 1
        self.squares, self.squared_errors = self.squares + squares, self.squared_errors + errors
        self.worst = max(self.worst, ((errors / squares) ** 0.5 if squares else 0.0, name))


def quantize(folder: Path, to: str, out: Path, *, head: bool = False) -> QuantizeReport:
    """Quantizes a checkpoint. `head`: also quantize the output head to 8 bits; tied embeddings get a separate copy.

    Raises InvalidArgument for an unsupported checkpoint, FailedPrecondition if `out` is in use.
    """
    config = checkpoint_folder.read_config(folder)
    checkpoint_folder.check_unused(out)
    if TRANSPOSED in config.get("architectures", []):
        raise InvalidArgument(
            f"folder: {TRANSPOSED} stores its weights transposed, which is not supported", field="folder"
        )
    files = checkpoint_folder.files(folder)
    shapes = checkpoint_folder.shapes(files)
    group = _group(shapes) if to == "w4a16" else 0
    report, head_of, head_name = QuantizeReport(out), None, HEAD
    if head:
        embedding, head_name = _tables(shapes)
        head_of = embedding if is_tied(config) else head_name
        untie(config)
    config["quantization_config"] = quantization_config(to, group, _towers(shapes), head=head)
    with CheckpointWriter.of(folder, out, config) as written:
        for path in files:
            tensors = _rewrite(path, SCHEMES[to](group), report)
            if head_of is not None and head_of in tensors:
                stored, _ = HEADS[to](0)(tensors[head_of].float())
                tensors.pop(head_name, None)
                beginning = head_name.removesuffix("weight")
                tensors |= {beginning + part: value.contiguous() for part, value in stored.items()}
                report.bytes_after += sum(value.nbytes for value in stored.values())
            written.add(path.name, tensors)
    return report


def _tables(names: Iterable[str]) -> tuple[str, str]:
    """Returns the names of the embeddings and of the output head, which multimodal models have in their text part."""
    embedding = next((name for name in names if name.endswith(EMBEDDING.removeprefix("model"))), EMBEDDING)
    return embedding, (TEXT_PREFIX if embedding.startswith(TEXT_PREFIX) else "") + HEAD


def _towers(names: Iterable[str]) -> tuple[str, ...]:
    """Returns the parts of a multimodal model beside its text part, as far as it has them."""
    names = tuple(names)
    return tuple(tower for tower in _beside_text() if any(name.startswith(tower) for name in names))


def _beside_text() -> tuple[str, ...]:
    """Returns the prefixes of towers and projectors, as the worker knows them."""
    known = importlib.import_module("quire.services.worker.models.loading.tensor_names").BESIDE_TEXT
    return tuple(map(str, known))


def _group(shapes: dict[str, list[int]]) -> int:
    """Returns the largest group size that divides every row; 0: one scale per row."""
    widths = {shape[1] for name, shape in shapes.items() if _is_projection(name, len(shape))}
    return next((group for group in GROUPS if all(width % group == 0 for width in widths)), 0)


def _is_projection(name: str, dimensions: int) -> bool:
    """Returns whether a tensor is a 2-D weight of a projection of the text model, not an embedding or head; raises
    InvalidArgument for experts."""
    if ".experts" in name:
        raise InvalidArgument(
            f"folder: {name} is a weight of experts, and models with experts are not supported", field="folder"
        )
    module = name.removesuffix(".weight").rpartition(".")[2]
    is_matrix = dimensions == 2 and name.endswith(".weight")
    return is_matrix and module not in TABLES and not name.startswith(_beside_text())


def _rewrite(path: Path, scheme: Callable[[Tensor], Quantized], report: QuantizeReport) -> dict[str, Tensor]:
    """Quantizes the projections of one safetensors file, leaves other tensors as they are, and adds errors and bytes
    to the report."""
    from safetensors.torch import load_file

    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(path).items():
        report.bytes_before += tensor.nbytes
        if _is_projection(name, tensor.dim()):
            weight = tensor.float()
            stored, floats = scheme(weight)
            report.add(name, weight, floats)
            added = {name.removesuffix("weight") + part: value.contiguous() for part, value in stored.items()}
        else:
            added = {name: tensor}
        report.bytes_after += sum(value.nbytes for value in added.values())
        tensors |= added
    return tensors


def _fp8(_: int) -> Callable[[Tensor], Quantized]:
    """Returns a scheme with float8_e4m3fn codes and one float32 scale per row."""
    import torch

    def scheme(weight: Tensor) -> Quantized:
        scales = (weight.abs().amax(1, keepdim=True) / FP8_MAX).clamp(min=1e-12)
        codes = (weight / scales).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales

    return scheme


def _int8(_: int) -> Callable[[Tensor], Quantized]:
    """Returns a scheme with int8 codes and one float32 scale per row."""
    import torch

    def scheme(weight: Tensor) -> Quantized:
        scales = (weight.abs().amax(1, keepdim=True) / INT8_MAX).clamp(min=1e-12)
        codes = (weight / scales).round()
        return {"weight": codes.to(torch.int8), "weight_scale": scales}, codes * scales

    return scheme


def _w4a16(group: int) -> Callable[[Tensor], Quantized]:
    """Returns a scheme with 4-bit codes and a bfloat16 scale per `group` columns (0: the whole row); of several
    clipped scales, each group gets the one with the least squared error."""
    import torch

    def scheme(weight: Tensor) -> Quantized:
        """Quantizes a [rows, columns] weight; returns the stored tensors and the weight that they represent."""
        rows, columns = weight.shape
        groups = weight.view(rows, -1, group or columns)
        largest = (groups.abs().amax(2, keepdim=True) / INT4_MAX).clamp(min=1e-12)
        best: tuple[Tensor, Tensor, Tensor] | None = None
        for clip in CLIPS:
            scales = (largest * clip).bfloat16().float()
            codes = (groups / scales).round().clamp(-INT4_MAX - 1, INT4_MAX)
            error = (codes * scales - groups).square().sum(2, keepdim=True)
            if best is None:
                best = scales, codes, error
            else:
                better = error < best[2]
                given = zip((scales, codes, error), best, strict=True)
                best = tuple(torch.where(better, one, other) for one, other in given)  # type: ignore[assignment]
        scales, codes, _ = best  # type: ignore[misc]
        stored = {
            "weight_packed": _words(codes.view(rows, columns), 4),
            "weight_scale": scales.squeeze(2).bfloat16(),
            "weight_shape": torch.tensor([rows, columns]),
        }
        return stored, (codes * scales).view(rows, columns)

    return scheme


def _w8a16(_: int) -> Callable[[Tensor], Quantized]:
    """Returns a scheme with packed 8-bit codes and one bfloat16 scale per row."""
    import torch

    def scheme(weight: Tensor) -> Quantized:
        """Quantizes a [rows, columns] weight; returns the stored tensors and the weight that they represent."""
        scales = (weight.abs().amax(1, keepdim=True) / INT8_MAX).clamp(min=1e-12).bfloat16().float()
        codes = (weight / scales).round().clamp(-INT8_MAX - 1, INT8_MAX)
        stored = {
            "weight_packed": _words(codes, 8),
            "weight_scale": scales.bfloat16(),
            "weight_shape": torch.tensor(weight.shape),
        }
        return stored, codes * scales

    return scheme


def _words(codes: Tensor, bits: int) -> Tensor:
    """Packs signed codes [rows, columns] into int32 words, 32 / bits per word, the first in the lowest bits."""
    import torch

    count = 32 // bits
    shifted = codes.to(torch.int64) + 2 ** (bits - 1)
    padded = torch.nn.functional.pad(shifted, (0, -codes.size(1) % count)).unflatten(1, (-1, count))
    words = (padded << torch.arange(0, 32, bits)).sum(2)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


SCHEMES: dict[str, Callable[[int], Callable[[Tensor], Quantized]]] = {"fp8": _fp8, "int8": _int8, "w4a16": _w4a16}

HEADS = {**SCHEMES, "w4a16": _w8a16}


def quantization_config(to: str, group: int, towers: tuple[str, ...] = (), *, head: bool = False) -> dict[str, Any]:
    """Returns compressed-tensors' quantization_config for config.json. `group` is the number of columns that share a
    scale (0: all); `towers` are prefixes of parts that stay as they are; `head` includes the output head."""
    kind = "float" if to == "fp8" else "int"
    weights: dict[str, Any] = {"num_bits": 4 if to == "w4a16" else 8, "type": kind, "symmetric": True, "dynamic": False}
    weights |= {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    inputs = None
    if to != "w4a16":
        inputs = {"num_bits": 8, "type": kind, "symmetric": True, "dynamic": True, "strategy": "token"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    groups = {"group_0": scheme}
    if head and to == "w4a16":
        of_head = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
        groups = {"group_0": {**scheme, "targets": ["lm_head"], "weights": of_head}, "group_1": scheme}
    return {
        "quant_method": "compressed-tensors",
        "format": {"fp8": "float-quantized", "int8": "int-quantized", "w4a16": "pack-quantized"}[to],
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": [*([] if head else ["lm_head"]), *(rf"re:.*{re.escape(tower)}.*" for tower in towers)],
        "kv_cache_scheme": None,
    }
