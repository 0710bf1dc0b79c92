"""Settings that merely describe the checkpoint, as other servers require them: accepted if they match the
checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from quire.cluster.options import ClusterOptions
from quire.shared.errors import InvalidArgument
from quire.shared.models import model_identity

# Given name -> name in config.json.
METHODS: Mapping[str, str] = {
    "awq": "awq",
    "awq_marlin": "awq",
    "bitsandbytes": "bitsandbytes",
    "compressed-tensors": "compressed-tensors",
    "gguf": "gguf",
    "gptq": "gptq",
    "gptq_marlin": "gptq",
}
# Given format -> names of files that must be in the folder.
FORMATS: Mapping[str, str] = {
    "bitsandbytes": "*.safetensors",
    "fastsafetensors": "*.safetensors",
    "gguf": "*.gguf",
    "hf": "*",
    "pt": "*.bin",
    "safetensors": "*.safetensors",
}
TYPES: Mapping[str, str] = {"half": "float16", "float": "float32"}
NAMES: Mapping[str, tuple[str, ...]] = {
    "quantization": tuple(METHODS),
    "load_format": tuple(FORMATS),
    "dtype": tuple(TYPES),
}


def without_redundant_settings(options: ClusterOptions) -> ClusterOptions:
    """Returns the options without settings that describe the checkpoint in `options.model_folder`. Raises
    InvalidArgument if they contradict it."""
    worker = dict(options.settings.get("worker", {}))
    folder = options.model_folder
    if (method := METHODS.get(worker.get("quantization", ""))) is not None:
        _check("quantization", worker["quantization"], method, _method(folder))
        worker["quantization"] = "none"
    elif worker.get("quantization") == "fp8" and _method(folder) == "fp8":
        worker["quantization"] = "none"
    if (files := FORMATS.get(worker.get("load_format", ""))) is not None:
        _check_files(worker["load_format"], files, folder)
        worker["load_format"] = "auto"
    if (dtype := TYPES.get(worker.get("dtype", ""))) is not None:
        worker["dtype"] = dtype
    return replace(options, settings={**options.settings, "worker": worker})


def _method(folder: Path) -> str:
    """Returns the quantization method of the checkpoint; "none" if it is not quantized."""
    if any(folder.glob("*.gguf")):
        return "gguf"
    section: Any = model_identity.read_config(folder).get("quantization_config")
    return str(section.get("quant_method", "none")) if isinstance(section, Mapping) else "none"


def _check(field: str, given: str, wanted: str, found: str) -> None:
    """Raises InvalidArgument unless the checkpoint's quantization method is the wanted one."""
    if found != wanted:
        remedy = "leave it out" if found != "none" else "`quire quantize` writes it in fp8, int8 or w4a16"
        message = f"{field}: {given} differs from config.json (quant_method {found}); {remedy}"
        raise InvalidArgument(message, field=field)


def _check_files(given: str, files: str, folder: Path) -> None:
    if not any(folder.glob(files)):
        message = f"load_format: {given} needs {files}, which {folder} does not contain; leave it out"
        raise InvalidArgument(message, field="load_format")
