"""Settings that repeat what the checkpoint's files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.cluster.checkpoint_settings import without_redundant_settings
from quire.cluster.options import ClusterOptions
from quire.shared.errors import InvalidArgument


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model.safetensors").touch()
    return quantized(tmp_path, "awq")


def quantized(folder: Path, method: str) -> Path:
    section = {"quantization_config": {"quant_method": method}} if method else {}
    (folder / "config.json").write_text(json.dumps({"vocab_size": 10} | section))
    return folder


def left(folder: Path, **worker: Any) -> dict[str, Any]:
    return dict(without_redundant_settings(ClusterOptions(str(folder), settings={"worker": worker})).settings["worker"])


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ("awq", "awq"),
        ("awq_marlin", "awq"),
        ("gptq", "gptq"),
        ("gptq_marlin", "gptq"),
        ("compressed-tensors", "compressed-tensors"),
        ("bitsandbytes", "bitsandbytes"),
        ("fp8", "fp8"),
    ],
)
def test_the_method_of_a_quantized_checkpoint_may_be_named(folder: Path, given: str, method: str) -> None:
    assert left(quantized(folder, method), quantization=given) == {"quantization": "none"}


def test_a_method_that_the_checkpoint_has_not_is_refused_with_what_it_has(folder: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"quantization: gptq differs from config\.json \(quant_method awq\); leave it out"
    ):
        left(folder, quantization="gptq")
    with pytest.raises(InvalidArgument, match=r"\(quant_method none\); `quire quantize`"):
        left(quantized(folder, ""), quantization="awq")


def test_quantization_at_load_stays_what_it_is(folder: Path) -> None:
    assert left(quantized(folder, ""), quantization="fp8") == {"quantization": "fp8"}
    assert left(folder, quantization="none", num_blocks=3) == {"quantization": "none", "num_blocks": 3}


@pytest.mark.parametrize("given", ["safetensors", "hf", "fastsafetensors", "bitsandbytes"])
def test_a_format_may_be_named_that_the_files_have(folder: Path, given: str) -> None:
    assert left(folder, load_format=given) == {"load_format": "auto"}


@pytest.mark.parametrize(("given", "files"), [("pt", r"\*.bin"), ("gguf", r"\*.gguf")])
def test_a_format_that_no_file_has_is_refused_with_what_it_needs(folder: Path, given: str, files: str) -> None:
    with pytest.raises(InvalidArgument, match=f"load_format: {given} needs {files}, which .* does not contain"):
        left(folder, load_format=given)


def test_types_have_the_names_that_torch_gives_them(folder: Path) -> None:
    assert left(folder, dtype="half") == {"dtype": "float16"}
    assert left(folder, dtype="bfloat16") == {"dtype": "bfloat16"}
