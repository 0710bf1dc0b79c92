"""Weights are distinguished by samples of their files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from quire import bundled
from quire.services.worker.models.loading import weight_samples
from quire.shared.settings import WorkerSettings
from tests import gguf_files

SMALL = "model.layers.0.input_layernorm.weight"


def tensors() -> dict[str, torch.Tensor]:
    """Creates tensors, the last so large that most of it lies between its file's samples."""
    numbers = torch.Generator().manual_seed(5)
    return {SMALL: torch.ones(64), "lm_head.weight": torch.randn(2048, 1024, generator=numbers)}


def as_safetensors(path: Path, held: dict[str, torch.Tensor]) -> None:
    save_file(held, path / "model.safetensors")


def as_pickle(path: Path, held: dict[str, torch.Tensor]) -> None:
    torch.save(held, path / "pytorch_model.bin")


def as_gguf(path: Path, held: dict[str, torch.Tensor]) -> None:
    plain = {name: gguf_files.plain(tensor) for name, tensor in held.items()}
    gguf_files.write(path / "model.gguf", {"general.architecture": "llama"}, plain)


@pytest.mark.parametrize("written", [as_safetensors, as_pickle, as_gguf])
def test_any_changed_tensor_changes_the_fingerprint(
    tmp_path: Path, written: Callable[[Path, dict[str, torch.Tensor]], None]
) -> None:
    found = []
    for number, change in enumerate(({}, {}, {SMALL: 2 * torch.ones(64)}, {"lm_head.weight": torch.ones(2048, 1024)})):
        folder = tmp_path / str(number)
        folder.mkdir()
        written(folder, tensors() | change)
        found.append(weight_samples.folder_digest(folder))
    assert all(map(len, found))
    assert found[0] == found[1]
    assert len(set(found)) == 3


def test_a_tensor_between_the_samples_of_its_file_is_seen(tmp_path: Path) -> None:
    """A small tensor is stored between large ones."""
    held = {"a": torch.randn(1 << 20), "b": torch.ones(16), "c": torch.randn(1 << 20)}
    found = set()
    for value in (1.0, 2.0):
        save_file(held | {"b": torch.full((16,), value)}, tmp_path / "model.safetensors")
        found.add(weight_samples.folder_digest(tmp_path))
    assert len(found) == 2


def test_a_layer_behind_the_model_counts(tmp_path: Path) -> None:
    found = []
    for value in (1.0, 2.0):
        as_safetensors(tmp_path, tensors())
        (tmp_path / "2_Dense").mkdir(exist_ok=True)
        save_file({"linear.weight": torch.full((4, 4), value)}, tmp_path / "2_Dense" / "model.safetensors")
        found.append(weight_samples.folder_digest(tmp_path))
    assert found[0] != found[1]


@pytest.mark.parametrize("content", [b"", b"\xff" * 100, b"\x08" + bytes(7) + b"[1, 2]  "])
def test_unreadable_files_have_no_fingerprint(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    assert weight_samples.weights_digest_of(WorkerSettings(model=str(tmp_path))) == b""
    assert weight_samples.weights_digest_of(WorkerSettings(model=str(tmp_path / "nowhere"))) == b""


def test_load_options_are_part_of_the_fingerprint() -> None:
    """Random weights count by their seed, and quantization at load time counts too."""
    folder = str(bundled.FOLDER)
    dummy = [WorkerSettings(model=folder, load_format="dummy", seed=seed) for seed in (0, 0, 1)]
    others = [WorkerSettings(model=folder), WorkerSettings(model=folder, quantization="fp8")]
    found = [weight_samples.weights_digest_of(settings) for settings in (*dummy, *others)]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    assert {len(one) for one in found} == {32}


def test_names_are_not_part_of_the_fingerprint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(bundled.FOLDER, tmp_path / name)
    for file in (tmp_path / "two").glob("*.safetensors*"):
        file.unlink()
    shutil.copy(next(bundled.FOLDER.glob("*.safetensors")), tmp_path / "two" / "weights.safetensors")
    assert weight_samples.folder_digest(tmp_path / "one") == weight_samples.folder_digest(tmp_path / "two")
