"""`quire size MODEL`: memory of weights and KV, and how many sequences fit into GPUs, before anything is loaded."""

from __future__ import annotations

import argparse
import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from quire import bundled
from quire.flags.setting_flags import add_setting, human_int
from quire.shared.errors import FailedPrecondition, InvalidArgument
from quire.shared.models import model_hub, model_identity
from quire.shared.models.text_part import text_part
from quire.shared.settings import SERVICES, WorkerSettings, load

GIB = 1 << 30
GPUS_GIB = (16, 24, 40, 48, 80, 96, 141, 180)  # memory of common GPUs
MOST_RANKS = 16
MAX_GPU_GIB = 100_000
SETTINGS = (
    "dtype",
    "kv_cache_dtype",
    "quantization",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "gpu_memory_utilization",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the GPU's memory, the length, and the worker's settings that affect the footprint."""
    parser.add_argument(
        "model", metavar="MODEL", help="a folder, a GGUF file, a config.json, ORG/NAME, or a shape of `quire bench`"
    )
    parser.add_argument(
        "--gpu-memory",
        type=_positive,
        metavar="GIB",
        help="memory of one GPU, GiB; default: a row for each common size",
    )
    parser.add_argument(
        "--length",
        type=human_int,
        metavar="TOKENS",
        default=0,
        help="tokens of prompt and answer together; default: max_model_len",
    )
    parser.add_argument(
        "--tensor-parallel-size",
        type=human_int,
        metavar="GPUS",
        help="GPUs per worker; default: the fewest that hold the model",
    )
    for name in SETTINGS:
        add_setting(parser, name, WorkerSettings.model_fields[name])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(arguments: argparse.Namespace) -> int:
    """Prints a row per GPU size; returns 1 if the model fits into none of them."""
    sizes = _Sizes(arguments)
    memories = (arguments.gpu_memory,) if arguments.gpu_memory else GPUS_GIB
    rows = [sizes.row(gib, arguments.tensor_parallel_size) for gib in memories]
    print(json.dumps(sizes.as_dict(rows)) if arguments.json else sizes.as_text(rows))
    return 0 if any(row.num_sequences for row in rows) else 1


class ModelFootprint(Protocol):
    """The worker's Footprint (services/worker/building/footprint.py), which is imported where it is installed."""

    architecture: str
    num_parameters: int
    weight_bytes: int
    activation_bytes: int
    kv_bytes_per_token: float
    limits: Any
    dtype: str
    quantization: str
    kv_dtype: str

    def num_blocks(self, gpu_bytes: int, utilization: float) -> int: ...

    def num_sequences(self, num_blocks: int, num_tokens: int) -> int: ...


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of GPU. All figures are 0 if the model does not fit into `num_gpus` of them."""

    gpu_gib: float
    num_gpus: int
    kv_tokens: int
    num_sequences: int


class _Sizes:
    """Footprints of one model by the number of GPUs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._values, folder = _config(arguments.model)
        given = {name: getattr(arguments, name) for name in SETTINGS if hasattr(arguments, name)}
        model = str(folder or arguments.model)
        self._settings = load(WorkerSettings, SERVICES, {**given, "model": model, "device": "cuda"})
        self._by_ranks: dict[int, ModelFootprint] = {}
        self.whole = self._footprint(1)
        self.length = arguments.length or self.whole.limits.max_model_len
        if self.length > self.whole.limits.max_model_len:
            text = (
                f"--length: {self.length} is more than max_model_len, {self.whole.limits.max_model_len}; give a "
                "smaller length"
            )
            raise InvalidArgument(text, field="length")

    def row(self, gpu_gib: float, num_gpus: int | None) -> Row:
        """Returns the row for `num_gpus` GPUs of this size; None: the fewest that hold the model and one sequence."""
        for ranks in (num_gpus,) if num_gpus else _powers(MOST_RANKS):
            try:
                found = self._footprint(ranks)
            except InvalidArgument:
                if num_gpus:
                    raise
                continue  # so many ranks do not divide its heads
            blocks = found.num_blocks(int(gpu_gib * GIB), self._settings.gpu_memory_utilization)
            sequences = found.num_sequences(blocks, self.length)
            if sequences:
                return Row(gpu_gib, ranks, sequences * self.length, sequences)
        return Row(gpu_gib, num_gpus or 0, 0, 0)

    def as_dict(self, rows: list[Row]) -> dict[str, Any]:
        """Returns the footprint and the rows as JSON values; memory in bytes, GPU memory in GiB."""
        whole = self.whole
        return {
            "architecture": whole.architecture,
            "num_parameters": whole.num_parameters,
            "weight_bytes": whole.weight_bytes,
            "dtype": whole.dtype,
            "quantization": whole.quantization or None,
            "kv_bytes_per_token": whole.kv_bytes_per_token,
            "kv_cache_dtype": whole.kv_dtype,
            "block_size": whole.limits.block_size,
            "max_model_len": whole.limits.max_model_len,
            "length": self.length,
            "gpu_memory_utilization": self._settings.gpu_memory_utilization,
            "gpus": [{name: getattr(row, name) for name in Row.__slots__} for row in rows],
        }

    def as_text(self, rows: list[Row]) -> str:
        """Returns the footprint and the rows as a table, with advice if the model fits nowhere."""
        whole = self.whole
        lines = [
            f"model     {whole.architecture}, {_count(whole.num_parameters)} stored values",
            f"weights   {whole.weight_bytes / GIB:.2f} GiB ({_types(whole)})",
            f"KV cache  {whole.kv_bytes_per_token / 1024:.1f} KiB a token ({whole.kv_dtype}), "
            f"blocks of {whole.limits.block_size}",
            f"step      about {whole.activation_bytes / GIB:.1f} GiB for activations, logits and the device itself",
            "",
            f"{'GPU memory':>10}  {'GPUs':>5}  {'tokens in KV':>13}  sequences of {self.length:,} tokens",
        ]
        for row in rows:
            gpus = f"{row.num_gpus:>5}" if row.num_sequences else f"{'-':>5}"
            fits = f"{row.num_sequences:,}" if row.num_sequences else "does not fit"
            lines.append(f"{row.gpu_gib:>6g} GiB  {gpus}  {row.kv_tokens or '-':>13}  {fits}")
        if not any(row.num_sequences for row in rows):
            lines += [
                "",
                "Shorter sequences (--max-model-len), --kv-cache-dtype fp8, --quantization fp8 or more GPUs need less.",
            ]
        return "\n".join(lines)

    def _footprint(self, num_ranks: int) -> ModelFootprint:
        """Returns the footprint of one rank out of `num_ranks`, computed once for each number."""
        if num_ranks not in self._by_ranks:
            found = _module().footprint(self._settings, self._values, num_ranks=num_ranks)
            self._by_ranks[num_ranks] = cast(ModelFootprint, found)
        return self._by_ranks[num_ranks]


def _module() -> Any:
    """Imports the worker's footprint module; raises FailedPrecondition if the worker is not installed."""
    try:
        return importlib.import_module("quire.services.worker.building.footprint")
    except ModuleNotFoundError as missing:
        text = f"quire size needs the worker, and {missing.name} is not installed; run pip install 'quire[worker]'"
        raise FailedPrecondition(text) from None


def _types(found: ModelFootprint) -> str:
    """Returns the types of the weights: of linear layers, and of the rest where that is another."""
    return f"{found.quantization}; what stays unquantized: {found.dtype}" if found.quantization else found.dtype


def _positive(text: str) -> float:
    """Returns the positive number that `text` says. Raises ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < MAX_GPU_GIB:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of GiB between 0 and {MAX_GPU_GIB}")
    return value


def _count(number: int) -> str:
    """Returns a number of values for people, in millions or billions."""
    return f"{number / 1e9:.2f} billion" if number >= 1e9 else f"{number / 1e6:.1f} million"


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length())]


def _config(model: str) -> tuple[dict[str, Any], Path | None]:
    """Returns a model's config.json and its folder, None for a shape of `quire bench`. Raises InvalidArgument where
    there is none on this machine."""
    shapes = importlib.import_module("quire.bench.workload.shapes").CONFIGS
    if model in shapes:
        return text_part(dict(shapes[model])), None
    if model == "tiny":
        return model_identity.read_config(bundled.FOLDER), bundled.FOLDER
    path = Path(model).expanduser()
    if path.name == "config.json" and path.is_file():
        return model_identity.read_config(path.parent), path.parent
    folder = model_hub.cached_folder(model)
    if folder is None:
        text = f"model: {model!r} is not on this machine; name a folder, a config.json, or one of {', '.join(shapes)}"
        raise InvalidArgument(text, field="model")
    return model_identity.read_config(folder), folder
